"""A fork server: Flower starts a process for every message, and importing torch costs seconds.

    python -P -m bract.deploy.fork_server SOCKET [--with-parent]

The server imports Flower, torch and bract once and forks a child for each command that
`bract.deploy.shim` passes over a Unix socket. It never runs a torch operation nor touches CUDA
itself, so a child may do both.
"""

from __future__ import annotations

import array
import atexit
import faulthandler
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path

from bract.deploy import flower
from bract.errors import BractError
from bract.flower import COMMANDS, entry_point
from bract.permissions import UMASK

_PRELOADED = (
    "torch",
    "sklearn.datasets",
    "datasets",
    "flwr_datasets.partitioner",
    "bract.client.app",
    "bract.server.app",
    "torch._dynamo",  # which an optimizer imports at its first step
)


def real_command(name: str) -> str:
    """Return the path of one of Flower's own commands, next to this Python or on the path."""
    here = Path(sys.executable).with_name(name)
    return str(here) if here.is_file() else shutil.which(name) or name


def serve(socket_path: str, *, parent: int | None = None) -> None:
    """Import everything, then fork a child for each connection until killed.

    With ``parent`` it ends by itself, within two seconds of the process of that number.
    """
    os.umask(UMASK)
    for name in COMMANDS:
        entry_point(name)
    for module in _PRELOADED:
        _preload(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{socket_path}~")
    listener.listen(64)
    # The socket appears under its final name only once a connection will be served at once.
    Path(f"{socket_path}~").rename(socket_path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(None if parent is None else 2.0)
    while parent in (None, os.getppid()):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(connection)
        connection.close()


def _preload(module: str) -> None:
    """Import a module, unless this installation has none of it: a site's has no server."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise


def _run(connection: socket.socket) -> None:
    code = 1
    try:
        descriptors = array.array("i")
        header, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * descriptors.itemsize))
        descriptors.frombytes(ancillary[0][2])
        length = int.from_bytes(header, "big")
        request = json.loads(connection.makefile("rb").read(length))
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        faulthandler.enable()  # a crash below Python leaves a trace in the log, too
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        connection.sendall(b"%d\n" % os.getpid())
        flower.run(request["argv"][0])
        code = 0
    except BractError as error:
        sys.stderr.write(f"{sys.argv[0]}: {error}\n")
    except SystemExit as stop:
        code = flower.exit_code(stop)
    except BaseException:  # noqa: BLE001 - this process ends here, with the reason, as any would
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            connection.sendall(b"%d\n" % code)
        finally:
            os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], parent=os.getppid() if "--with-parent" in sys.argv else None)
