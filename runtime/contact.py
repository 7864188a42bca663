"""The time of the SuperLink's last answer to a SuperNode, for its health check."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bract.runtime import sockets
from bract.runtime.rule import Rule

if TYPE_CHECKING:
    import httpx

CONTACT = "contact"
"""File next to a SuperNode's socket whose time is that of the SuperLink's last answer."""


class Contact:
    """Interceptor that notes when the SuperLink answered a question for messages."""

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Pass a request on."""
        response: httpx.Response = call_next(context)
        if response.is_success and str(context.rpc_method).endswith("/PullMessages"):
            note_contact()
        return response


def note_contact() -> None:
    """Note that the SuperLink has answered this SuperNode."""
    if sockets.FOLDER in os.environ:
        (Path(os.environ[sockets.FOLDER]) / CONTACT).touch(mode=0o600)


def contact_age(folder: Path) -> float | None:
    """Return the seconds since then, None where the SuperNode of a folder has had no answer."""
    try:
        return max(0.0, time.time() - (folder / CONTACT).stat().st_mtime)
    except FileNotFoundError:
        return None


RULE = Rule(
    name="signs of life",
    kind="reliability",
    commands=("flower-supernode",),
    needs=(f"{sockets.CONSTRUCTED}(interceptors)",),
    does="`bract health` knows when the SuperLink answered a SuperNode last.",
    without="`bract health` says that a SuperNode had no answer yet.",
    after=("patience of a refused SuperNode",),
    put=lambda _: {sockets.CONSTRUCTED: sockets.intercepted(Contact())},
)
