"""Wait for the clients of a run, name who is missing, and give up in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from bract.errors import RunFailedError

POLL = 1.0
"""Seconds between two looks at who is connected."""

_log = logging.getLogger(__name__)


class Waiting:
    """Waits until enough clients are there.

    Attributes
    ----------
    timeout
        Seconds after which the run fails.
    expected
        Names of the clients that took part in earlier rounds, where they are known.
    announce
        Called with a line that names who is missing, each time it changes, and with None at the
        end of the wait.
    """

    def __init__(self) -> None:
        self.timeout = 3600.0
        self.expected: frozenset[str] = frozenset()
        self.announce: Callable[[str | None], None] = lambda _: None

    def until(self, present: Callable[[], Iterable[str]], wanted: int) -> None:
        """Return once ``present()`` names as many clients as are ``wanted``.

        Raises
        ------
        RunFailedError
            If they are not there within `timeout`.
        """
        deadline = time.monotonic() + self.timeout
        announced: str | None = None
        while len(here := sorted(present())) < wanted:
            line = self._line(here, wanted)
            if time.monotonic() > deadline:
                self.announce(None)
                raise RunFailedError(
                    f"gave up after strategy.timeout of {self.timeout:.0f} s {line}; start the "
                    "missing clients, then go on with --resume",
                    code="clients-missing",
                )
            if line != announced:
                _log.warning("%s", line)
                self.announce(line)
                announced = line
            time.sleep(POLL)
        if announced is not None:
            self.announce(None)

    def _line(self, here: list[str], wanted: int) -> str:
        # A node without a name may be any of them.
        named = self.expected.issuperset(here)
        missing = sorted(self.expected - set(here)) if named else []
        return (
            f"waiting for clients: {len(here)} of {wanted} are connected"
            + (f" ({', '.join(here[:8])})" if here else "")
            + (f", missing: {', '.join(missing[:8])}" if missing else "")
        )
