"""The one error text that a server receives after a failure at this site."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from bract.errors import BractError, out_of_memory

FAILED = (
    "work on this site's data failed; nothing was sent, and the round counts as answered. The "
    "reason is in this client's own log alone (the output of its SuperNode; of a run on one "
    "machine logs/client-N.log in the run directory)"
)
"""The one wording for whatever went wrong in training, scoring, defending and encrypting."""


class IndependentError(BractError):
    """A failure that depends on no value of the site's data, so that the server may read why."""

    code = "site-failed"


_log = logging.getLogger(__name__)


@contextmanager
def hiding(what: str, *, own: bool = True) -> Iterator[None]:
    """Log whatever the block raises, and raise `FAILED` in its place.

    What depends on no value of the data passes as it is: lack of memory, which depends on sizes
    that the server knows, and `IndependentError`.

    Parameters
    ----------
    what
        The work, as the log line begins.
    own
        Whether bract's own errors are hidden too; other packages' always are.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error) or isinstance(error, IndependentError):
            raise
        if not own and isinstance(error, BractError):
            raise
        _log.error("%s failed; the server is sent no reason", what, exc_info=error)
        raise BractError(FAILED, code="site-failed") from None
