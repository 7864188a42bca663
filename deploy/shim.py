"""Replace a Flower command: let the fork server run it, or start it afresh.

Standard library only, and few modules of it: this starts once for every message.
"""

import array
import json
import os
import signal
import socket
import sys

SOCKET = "BRACT_FORK_SERVER_SOCKET"
"""Environment variable that names the socket of the fork server."""


def main() -> None:
    """Run the command named by the first argument with the rest as its arguments."""
    name, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[SOCKET])
    except (KeyError, OSError):
        afresh = [sys.executable, "-P", "-m", "bract.deploy.flower", name, *arguments]
        os.execv(sys.executable, afresh)
    request = json.dumps(
        {
            "argv": [name, *arguments],
            "env": dict(os.environ),
            "cwd": os.getcwd(),  # noqa: PTH109
        }
    ).encode()
    header = len(request).to_bytes(4, "big")
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    connection.sendmsg([header], [rights])
    connection.sendall(request)
    replies = connection.makefile("rb")
    pid = int(replies.readline() or b"0")

    def forward(number: int, _frame: object) -> None:
        if pid:
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    code = replies.readline()
    if not code:
        sys.stderr.write(f"{name}: process {pid} was killed from outside, perhaps for memory\n")
    sys.exit(int(code or b"1"))


if __name__ == "__main__":
    main()
