"""A fork server: Flower starts a process for every message, and importing torch costs seconds.

The server imports Flower, torch and bract once and forks a child for each command that the shims
in `write_shims` hand over a Unix socket. It never runs a torch operation nor touches CUDA itself,
so a child may do both.
"""

from __future__ import annotations

import array
import atexit
import importlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bract.cli import shim

COMMANDS = {
    "flwr": "flwr.cli.app:app",
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
}

_PRELOADED = (
    "torch",
    "sklearn.datasets",
    "datasets",
    "flwr_datasets.partitioner",
    "bract.client.app",
    "bract.server.app",
)


def write_shims(folder: Path) -> None:
    """Write one executable for each of Flower's commands that hands over to the warm server."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        script = folder / name
        script.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -ISE "{shim.__file__}" {name} "$@"\n'
        )
        script.chmod(0o755)


def real_command(name: str) -> str:
    """Return the path of one of Flower's own commands, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name) or name


def serve(socket_path: str) -> None:
    """Import everything, then fork a child for each connection until killed."""
    entries = {name: _load(reference) for name, reference in COMMANDS.items()}
    for module in _PRELOADED:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{socket_path}.starting")
    listener.listen(64)
    # The socket appears under its final name only once a connection will be served at once.
    Path(f"{socket_path}.starting").rename(socket_path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(connection, entries)
        connection.close()


def _load(reference: str) -> Callable[[], Any]:
    module, _, attribute = reference.partition(":")
    entry: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    return entry


def _run(connection: socket.socket, entries: dict[str, Callable[[], Any]]) -> None:
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
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        connection.sendall(b"%d\n" % os.getpid())
        entries[request["argv"][0]]()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            connection.sendall(b"%d\n" % code)
        finally:
            os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
