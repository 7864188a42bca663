"""Replace a Flower command: let the fork server run it, or start it afresh.

Standard library only, and few modules of it: this starts once for every message.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET = "BRACT_FORK_SERVER_SOCKET"
"""Environment variable that names the socket of the fork server."""

APPS = ("flwr-clientapp", "flwr-serverapp")
"""Commands that run an app. Flower starts them and looks no further after the process."""

WITH_TORCH = (*APPS, "flwr-simulation")
"""Commands that need torch; the others do without."""

PLAIN = ".plain"
"""Ending of the socket of a fork server without torch, next to that of one with it."""


def ask(name: str, arguments: list[str]) -> socket.socket | None:
    """Ask the fork server to run a command with this process's standard input, output and error.

    Returns
    -------
    socket.socket or None
        What `follow` reads; None where no server answers.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        place = os.environ[SOCKET]
        plain = f"{place}{PLAIN}"
        without = name not in WITH_TORCH and os.path.exists(plain)  # noqa: PTH110
        connection.connect(plain if without else place)
        request = json.dumps(
            {
                "argv": [name, *arguments],
                "env": dict(os.environ),
                "cwd": os.getcwd(),  # noqa: PTH109
            }
        ).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
        connection.sendmsg([len(request).to_bytes(4, "big")], [rights])
        connection.sendall(request)
    except (KeyError, OSError):
        connection.close()
        return None
    return connection


def follow(
    name: str, connection: socket.socket, started: Callable[[int], None] = lambda _: None
) -> int:
    """Wait for the end of a command that was asked for; return its exit code.

    ``started`` is called with the number of its process, 0 where there is none.
    """
    with connection, connection.makefile("rb") as replies:
        pid = int(replies.readline() or b"0")
        started(pid)
        code = replies.readline()
    if not code:
        sys.stderr.write(f"{name}: process {pid} was killed from outside, perhaps for memory\n")
    return int(code or b"1")


def main() -> None:
    """Run the command named by the first argument with the rest as its arguments."""
    name, *arguments = sys.argv[1:]
    connection = ask(name, arguments)
    if connection is None:
        afresh = [sys.executable, "-P", "-m", "bract.runtime.flower", name, *arguments]
        os.execv(sys.executable, afresh)

    def forward_to(pid: int) -> None:
        def forward(number: int, _frame: object) -> None:
            if pid:
                os.kill(pid, number)

        signal.signal(signal.SIGTERM, forward)
        signal.signal(signal.SIGINT, forward)

    sys.exit(follow(name, connection, forward_to))


if __name__ == "__main__":
    main()
