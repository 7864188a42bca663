"""What a SuperNode does where the SuperLink or its gateway does not take it.

Flower's SuperNode ends with exit code 305 on the SuperLink's 412, whatever the reason, and logs
that it "terminated gracefully" on a 401. A SuperLink answers 412 for `LAPSE` seconds after a site
was killed, because it counts the killed process as connected until its heartbeat lapses, and
always where it does not know the key. Under this rule a SuperNode asks again, less often each
time, and ends with one line that names the cause once the earlier heartbeat must have lapsed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bract.runtime.rule import Rule
from bract.runtime.sockets import CONSTRUCTED, intercepted

if TYPE_CHECKING:
    import httpx


LAPSE = 60.0
"""Seconds after its last heartbeat in which a SuperNode counts as connected (Flower 1.41)."""

PATIENCE = LAPSE + 15.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 15.0
"""Seconds between two requests to be taken; the pause doubles from the first to the longest."""

_ACTIVATE = "/ActivateNode"

_NOT_YET = (
    "the SuperLink does not take this site yet: either an earlier process of this site, which was "
    f"killed, counts as connected for up to {LAPSE:.0f} s, or its key is not registered; "
    f"asking again for {PATIENCE:.0f} s"
)
_NEVER = (
    "the SuperLink does not take this site: its key is not registered there, or was revoked, or "
    "another process with the same kit is connected; end the other process, or ask the operator "
    "(`bract site list` names the sites, `bract site register` registers them)"
)
_SHUT_OUT = (
    "the SuperLink refuses this site's key: the site was revoked, the SuperLink's state was lost, "
    "or the clock here is wrong; ask the operator (`bract site list`), who registers the sites "
    "again with `bract site register`"
)
_EXPIRED = (
    "the certificate of the gateway has expired; the operator renews it with `bract site renew` "
    "and starts the gateway again, then start this site again"
)
_UNTRUSTED = (
    "the certificate of the gateway is not to be trusted; `bract doctor --kit DIR` finds what is "
    "wrong with it"
)


class Admission:
    """Interceptor that reports once why the SuperLink or its gateway refuses this SuperNode.

    It must be the outermost one: a request that is sent again is signed again.

    Parameters
    ----------
    print_line
        Prints a line for the person who runs the site.
    """

    refused = False
    """Whether this process was refused for a cause that a new start alone does not remove."""

    def __init__(self, print_line: Callable[[str], None] | None = None) -> None:
        self._print = print_line or _print

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Send a request, and again where the SuperLink does not take the site yet."""
        import httpx

        began, pause, announced = time.monotonic(), FIRST_PAUSE, False
        unsigned = context.request.headers.copy()
        while True:
            context.request.headers = unsigned.copy()
            response = self._try(context, call_next)
            if response.is_success:
                Admission.refused = False
            if response.status_code == httpx.codes.UNAUTHORIZED:
                self._refuse(_SHUT_OUT)
            if response.status_code != httpx.codes.PRECONDITION_FAILED or not str(
                context.rpc_method
            ).endswith(_ACTIVATE):
                return response
            if time.monotonic() - began > PATIENCE:
                self._refuse(_NEVER)
                return response
            if not announced:
                announced = True
                self._print(_NOT_YET)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _try(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        import httpx

        try:
            return call_next(context)
        except httpx.ConnectError as error:
            text = str(error).lower()
            if "certificate" in text:
                self._refuse(_EXPIRED if "expired" in text else _UNTRUSTED)
            elif "ssl" in text:
                # A gateway that is ended in a handshake; Flower gives up on the word.
                raise httpx.ConnectError("the gateway closed the connection") from error
            raise

    def _refuse(self, why: str) -> None:
        if not Admission.refused:
            Admission.refused = True
            self._print(why)


def exit_code(flowers: str | int | None) -> str | int | None:
    """Return 2, as for bad input, where the SuperLink or its gateway refused; else Flower's."""
    return 2 if Admission.refused else flowers


def _print(text: str) -> None:
    sys.stderr.write(f"flower-supernode: {text}\n")
    sys.stderr.flush()


RULE = Rule(
    name="patience of a refused SuperNode",
    kind="reliability",
    commands=("flower-supernode",),
    needs=(f"{CONSTRUCTED}(interceptors)",),
    does="A SuperNode that is refused asks again and names the cause.",
    without="A SuperNode that was killed is refused for a minute, without a word why.",
    after=("repeated requests",),
    put=lambda _: {CONSTRUCTED: intercepted(Admission())},
)
