"""Requests that a SuperLink failed to answer are sent again.

Flower's processes ask again where the link or a gateway is away, and end on any other error. A
SuperLink answers 500 also where its database was busy for longer than a request waits, which
concerns no message in particular: a SuperNode would lose its answer, or a server app its run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bract.runtime.rule import Rule
from bract.runtime.sockets import CONSTRUCTED, intercepted

if TYPE_CHECKING:
    import httpx


PATIENCE = 60.0
"""Seconds for which a request is sent again."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between two requests; the pause doubles from the first to the longest."""

_log = logging.getLogger(__name__)


class Retries:
    """Interceptor that sends a request again where the SuperLink answered with an internal error.

    It must be the outermost one: a request that is sent again is signed again.
    """

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Send a request, and again for `PATIENCE` seconds while it fails at the SuperLink."""
        import httpx

        began, pause = time.monotonic(), FIRST_PAUSE
        unsigned = context.request.headers.copy()
        while True:
            context.request.headers = unsigned.copy()
            response = call_next(context)
            left = PATIENCE - (time.monotonic() - began)
            if response.status_code != httpx.codes.INTERNAL_SERVER_ERROR or left <= 0:
                return response
            _log.warning(
                "the SuperLink failed to answer %s (500); asking again", context.rpc_method
            )
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


RULE = Rule(
    name="repeated requests",
    kind="reliability",
    commands=("flower-supernode", "flwr-serverapp"),
    needs=(f"{CONSTRUCTED}(interceptors)",),
    does="A SuperNode and a server app ask again after an internal error of the SuperLink.",
    without="A database that is busy for long costs an answer, or a run.",
    after=("requests to sockets",),
    put=lambda _: {CONSTRUCTED: intercepted(Retries())},
)
