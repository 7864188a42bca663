"""Stand in for a Flower command: let the warm server run it, or run the real one.

Standard library only, and few modules of it: this starts once for every message.
"""

import array
import json
import os
import signal
import socket
import sys


def main() -> None:
    """Run the command named by the first argument with the rest as its arguments."""
    name, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ["BRACT_WARM_SOCKET"])
    except (KeyError, OSError):
        real = os.path.join(os.environ["BRACT_REAL_BIN"], name)  # noqa: PTH118
        os.execv(real, [real, *arguments])
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
    sys.exit(int(replies.readline() or b"1"))


if __name__ == "__main__":
    main()
