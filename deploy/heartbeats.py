"""A client app that was killed is missed after half a minute instead of a whole one.

A SuperNode learns that its ClientApp is gone when its token runs out, `TOKEN_SECONDS` after the
last heartbeat; until then the round waits. Flower's own are sixty, and a heartbeat every twenty or
so. What an app has to start up stays: thirty seconds from the claim to its first heartbeat.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from bract.deploy import sockets
from bract.deploy.rules import replace
from bract.flower import HEARTBEAT, NODE_TASKS

TOKEN_SECONDS = 30
"""How long a token lives after a heartbeat; Flower's interval (30) times its patience."""

_SENDER_INTERVAL = 15
"""Flower's sender beats at 0.7 to 0.9 of this less five seconds: every 7 to 9 s."""


CONTACT = "contact"
"""File next to a SuperNode's socket whose time is that of the SuperLink's last answer."""


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


def expire_sooner() -> None:
    """Let the token of a ClientApp run out sooner; call it in a SuperNode."""
    replace(NODE_TASKS, "HEARTBEAT_PATIENCE", 1)


def beat_faster() -> None:
    """Send heartbeats more often; call it in a ClientApp of such a SuperNode."""
    replace(HEARTBEAT, "HEARTBEAT_DEFAULT_INTERVAL", _SENDER_INTERVAL)
