"""The gate of a site: how a message gets to the site's data, and what may leave then.

A message is admitted by the site's policy and counted in its record; only then are the data opened.
Out come the answer, a reason that depends on the request alone, or one constant refusal. Whichever
ClientApp answers, bract's own or another under a mod, its messages pass here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict

from bract.client.accounting import Mechanism
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.private import OwnFileError, warn_of_open_folders
from bract.client.refusals import note_refusal
from bract.client.site import UNNAMED, site_name
from bract.errors import (
    BractError,
    contained,
    not_installed,
    one_line,
    out_of_memory,
    reworded,
)
from bract.process.logs import UNSENT
from bract.protocol.codes import REFUSED, ErrorCode

NO_MEMORY = (
    "out of memory; lower training.batch_size, or give this client more memory or another device "
    "in its node config"
)
"""In the place of an error of memory, whose own text holds sizes that depend on the data."""

REASONS = frozenset(
    {
        "app-refused",
        "bract-version",
        "code-untrusted",
        "config-conflict",
        "config-key",
        "config-value",
        "decryption-refused",
        "defense-failed",
        "defense-unsuited",
        "encryption-required",
        "flower-version",
        "identity-refused",
        "input-mismatch",
        "key-mismatch",
        "key-missing",
        "message-malformed",
        "model-mismatch",
        "model-unsuited",
        "package-missing",
        "policy-refused",
        "privacy-budget",
        "request-refused",
        "round-mismatch",
        "state-lost",
        "text-malformed",
        "unknown-name",
        "update-refused",
    }
)
"""Codes of errors about the message, the run's configuration and the state of the protocol. Such a
reason leaves while the data are closed, since none of it can be read then."""

_PATH = re.compile(r"(?<![\w./<])[\w.~-]*/[\w.~-]")
"""Where a path begins in a reason, from the root or not. It stays at the site, whoever named it."""

_log = logging.getLogger(__name__)


class IndependentError(BractError):
    """A failure that depends on the request alone, so that the server may read why at any time."""

    code = "site-failed"


class Gate:
    """One message's way to a site's data.

    Parameters
    ----------
    context
        Of the message; its node config names the site and the folder of its records.
    """

    def __init__(self, context: Context) -> None:
        config = context.node_config
        folder = config.get("state-dir")
        self.folder = None if folder is None else Path(str(folder))
        self.client = site_name(config)
        if self.folder is None and self.client == UNNAMED:
            self.client = f"node-{context.node_id}"  # as others call it; nothing outlives this node
        self._opened = False
        self._answers: Answers | None = None
        self._request: Request | None = None
        self._mechanism: Mechanism | None = None
        self._charged = True
        self._price: Mechanism | None = None
        warn_of_open_folders(context.state, self.folder)

    def admit(
        self,
        answers: Answers,
        request: Request,
        mechanism: Mechanism | None = None,
        *,
        charged: bool = True,
    ) -> RecordDict | None:
        """Refuse a message that the policy or the record does not allow; the data stay closed.

        Parameters
        ----------
        mechanism
            The noise on the update that is asked for; None where it has none.
        charged
            False where the noise depends on the data: `charge` counts it once they are open.

        Returns
        -------
        RecordDict or None
            The reply of before, where this is the last message of its kind once more.

        Raises
        ------
        PolicyError
            If the message must not be answered.
        """
        self._answers, self._request = answers, request
        self._mechanism, self._charged = mechanism, charged
        return answers.admit(request, mechanism, charged=charged)

    def open(self, price: Mechanism | None = None) -> None:
        """Count the admitted message as answered; the data may be opened from here on.

        Whatever becomes of the answer then costs its round: a refusal is an answer, too.

        Parameters
        ----------
        price
            The noise to count where a failure comes before `charge` and `drop_price`.

        Raises
        ------
        PolicyError
            If it was answered in the meantime.
        BractError
            If the record cannot be written.
        """
        assert self._answers is not None and self._request is not None
        self._answers.commit(self._request, self._mechanism, charged=self._charged)
        self._opened = True
        self._price = None if self._charged else price

    def open_uncounted(self) -> None:
        """Let an app work on the data whose own mod counts the message at a gate of its own."""
        self._opened = True

    def drop_price(self) -> None:
        """Count no noise for a later failure before `charge`: it depends on no example's values."""
        self._price = None

    def charge(self, mechanism: Mechanism) -> None:
        """Count the noise of an update that was not known before the data were open."""
        assert self._answers is not None and self._request is not None
        self._answers.charge(self._request, mechanism)
        self._charged = True

    def keep(self, reply: Message) -> Message:
        """Keep the answer for the same message once more, and return it."""
        assert self._answers is not None and self._request is not None
        if not self._charged:
            raise BractError("the noise of this update was not counted", code="privacy-budget")
        self._answers.keep(self._request, reply.content)
        return reply

    @contextmanager
    def own_settings(self) -> Iterator[None]:
        """Keep the reason of an error in the site's own files and settings at the site."""
        opened, self._opened = self._opened, True
        yield
        self._opened = opened  # not after an error, which `refusal` then takes for one of the site

    def _pay(self) -> None:
        """Count the noise of an update that failed before its own was known."""
        price, self._price = self._price, None
        if price is None:
            return
        assert self._answers is not None and self._request is not None
        try:
            self._answers.charge(self._request, price, limited=False)
        except BractError as error:
            _log.error("the noise of an update that failed was not counted: %s", error)

    def _is_own(self, error: BractError) -> bool:
        """Return whether the reason may depend on the site's data, files or settings, or name a
        path.
        """
        if self._opened or isinstance(error, OwnFileError):
            return True
        # Not the site's own paths alone: whether a path that a run names is one would show.
        return _PATH.search(str(error)) is not None

    def refusal(self, error: Exception) -> BractError:
        """Note an error at the site, and return what the server may read of it.

        Whatever fails on the way leaves no other text: an error's own code may raise, too.
        """
        try:
            with contained():
                return self._refusal(error)
        except Exception as further:  # noqa: BLE001 - its text may hold what the first one read
            kinds = f"{type(error).__name__}, and {type(further).__name__} where that was noted"
            _log.error("%s: %s %s", self.client, UNSENT, kinds)
            return BractError(REFUSED, code="site-failed")

    def _refusal(self, error: Exception) -> BractError:
        self._pay()
        note_refusal(self.folder, self.client, error)
        if isinstance(error, IndependentError):
            return error
        if isinstance(error, ImportError) and (missing := not_installed(error)) is not None:
            return missing
        if out_of_memory(error):
            _log.error("out of memory", exc_info=error)
            return BractError(NO_MEMORY, code="out-of-memory")
        if isinstance(error, BractError) and error.code in REASONS and not self._is_own(error):
            return error
        # The message of bract's own errors suffices; of others the operator needs the place.
        trace = None if isinstance(error, BractError) else error
        _log.error("%s: %s %s", self.client, UNSENT, one_line(error, 4000), exc_info=trace)
        return BractError(REFUSED, code="site-failed")


@contextmanager
def guarded(context: Context) -> Iterator[Gate]:
    """Work on a message behind a gate; what it raises names the client.

    Raises
    ------
    BractError
        What `Gate.refusal` makes of whatever the block raises.
    """
    gate = Gate(context)
    try:
        with contained():
            yield gate
    except Exception as error:  # noqa: BLE001 - no error of the site's own leaves
        refused = gate.refusal(error)
        raise reworded(refused, f"{gate.client}: {refused}") from None


def passing(msg: Message, context: Context, handle: Callable[[Gate], Message]) -> Message:
    """Answer a message to an app behind a `Gate`; what is refused becomes an error reply."""
    gate = Gate(context)
    try:
        with contained():
            return handle(gate)
    except Exception as error:  # noqa: BLE001 - none of the app's own errors leaves
        refused = gate.refusal(error)
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(refused)), reply_to=msg)
