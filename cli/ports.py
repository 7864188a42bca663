"""Ports on loopback: free ones, and whether a Flower service answers."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


def is_free(port: int) -> bool:
    """Tell whether a port can be listened on."""
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_healthy(port: int) -> bool:
    """Tell whether a SuperLink or SuperNode answers on a port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
