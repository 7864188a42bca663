"""A Ray of one command's own, out of reach of other users of this machine and of the network."""

from __future__ import annotations

import secrets
from pathlib import Path

SESSION_BYTES = 70
"""Bytes that the longest path of Ray's sockets has beyond its folder."""


def private_ray(folder: Path) -> dict[str, str]:
    """Return the environment of a process that starts this Ray or joins it.

    Parameters
    ----------
    folder
        Where Ray keeps its sockets and logs, this user's alone.
    """
    return {
        "RAY_TMPDIR": str(folder),
        # Ray listens on TCP, and a client that may submit a task runs code as this user: the first
        # has it listen on the loopback interface alone, and the others ask for a secret there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A process has the device that its own settings name, also where Ray gave it no GPU.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
