"""A fork server: Flower starts a process for every message, and importing torch costs seconds.

It imports once what those processes need and forks a child for each command that
`bract.runtime.shim` passes over a Unix socket. `bract run` starts one of its own::

    python -P -m bract.runtime.fork_server SOCKET [--with-parent]

It is two processes: one has imported Flower alone, and forks the SuperLink and the SuperNodes while
the other still imports torch, from which apps are forked.

A SuperNode forks one from itself (`start_beside`) once Flower is imported, so that the pages of
Flower are shared by the SuperNode, this server and the process that starts apps, and torch is
loaded in one process of a site at most. Where apps read a Paillier key, it makes the key's tables
(`bract.client.encrypted.keys`) and holds them with the key, as each of these processes does. It
never runs a torch operation nor touches CUDA
itself, so a child may do both.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import operator
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from bract.disk.permissions import UMASK
from bract.errors import BractError
from bract.installed import plugins
from bract.runtime import clock, shim

Load = Literal["start", "message", "each"]
"""When a site imports torch: at the start; when the first message comes, until none has come for
`IDLE` seconds; or anew for each, without a fork server."""

IDLE = 600.0
"""Seconds without a message after which a server that loads with the first message begins anew."""

_ALL = ("torch", "bract.client.app", "bract.server.app")
"""What the server of `bract run` imports, whose clients begin at once."""

_SELDOM = (
    "sklearn.datasets",
    "datasets",
    "flwr_datasets.partitioner",
    "bract.client.encrypted.client",
    "torch._dynamo",  # which an optimizer of torch imports when it is made
)
"""What some apps import, three seconds of it: the server does once an app has."""

_FIRST = ("torch", "bract.client.app")
"""What the server of a site imports. It imports the others once an app has used them: a site that
reads its own pictures never needs scikit-learn."""

_KEYS = "bract.client.encrypted.keys"
_MOST_KEYS = 8
"""Keys that a child names: as many have their tables kept."""

_SEEDED = {
    "numpy.random": "seed",
    "torch": "default_generator.seed",
    "datasets.fingerprint": "fingerprint_rng.seed",
}
"""Modules with a generator that a child would share, and what seeds it from the system's."""

_PYTHON = (sys.executable, "-P")

_PAUSE = 2.0
_SUPEREXEC = 5.0
"""Seconds that a site's server waits, before it imports, for the process that starts apps: that one
is to share the pages of Flower alone."""


def real_command(name: str) -> str:
    """Return the path of one of Flower's own commands, next to this Python or on the path."""
    here = Path(sys.executable).with_name(name)
    return str(here) if here.is_file() else shutil.which(name) or name


def serve(socket_path: str, *, parent: int | None = None) -> None:
    """Import everything, then fork a child for each connection until killed.

    With ``parent`` it ends by itself, within two seconds of the process of that number.
    """
    from bract.installed.flower import COMMANDS, entry_point

    os.umask(UMASK)
    for name in COMMANDS:
        entry_point(name)
    _preload("bract.runtime.flower")
    # The sockets appear under their final names once connections are served, or will be.
    places = [f"{socket_path}{shim.PLAIN}", socket_path]
    plain, apps = (_listen(f"{place}~") for place in places)
    own = os.getpid()
    loading = _forked(lambda: _serve_apps(apps, own), closing=plain)
    apps.close()
    for place in places:
        Path(f"{place}~").rename(place)
    _Server(plain, parent, later=(), other=loading).run()


def _serve_apps(listener: socket.socket, parent: int) -> None:
    server = _Server(listener, parent, later=_SELDOM)
    server.preload(_ALL)
    server.run()


def _forked(serve: Callable[[], None], closing: socket.socket) -> int:
    """Return the number of a process of its own that serves, and ends with this one."""
    gc.collect()
    gc.freeze()
    child = os.fork()
    if child:
        return child
    closing.close()
    try:
        serve()
    except BaseException:  # noqa: BLE001 - this process's own code must not run twice
        traceback.print_exc()
    finally:
        os._exit(1)


def command_beside(socket_path: Path, load: Load, name: str) -> list[str]:
    """Return how to start one of Flower's commands with a fork server beside it."""
    return [*_PYTHON, "-m", "bract.runtime.fork_server", "--beside", str(socket_path), load, name]


def start_beside(socket_path: str, load: Load) -> None:
    """Fork a server from this process, which has imported Flower and has no thread yet.

    It listens when this returns, and ends within two seconds of this process.

    Parameters
    ----------
    socket_path
        Where it listens; what an earlier one left there is removed.
    load
        When it imports torch; not ``each``.
    """
    for left in (socket_path, f"{socket_path}~"):
        Path(left).unlink(missing_ok=True)
    listener = _listen(socket_path)
    # What is there now is not looked through for garbage again, so that its pages stay shared.
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    if os.fork():
        listener.close()
        return
    try:
        os.setsid()  # Ctrl-C reaches it by way of its parent alone
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _Server(listener, parent, later=(*_ALL, *_SELDOM), load=load).run()
    except BaseException:  # noqa: BLE001 - the SuperNode's own code must not run twice
        traceback.print_exc()
    finally:
        os._exit(1)


def _listen(place: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    return listener


class _Server:
    """Forks children, and imports for them.

    Parameters
    ----------
    parent
        Process with which it ends; None runs until it is killed.
    later
        Modules that are imported here once a child was seen to have imported them.
    load
        When it imports torch, or None where everything is imported already.
    other
        Number of another process, without which it ends.
    """

    def __init__(
        self,
        listener: socket.socket,
        parent: int | None,
        *,
        later: tuple[str, ...],
        load: Load | None = None,
        other: int | None = None,
    ) -> None:
        self.other = other
        self.listener, self.parent, self.later, self.load = listener, parent, later, load
        self.loaded = load is None
        self.seen, self.report = os.pipe()
        self.began = self.asked = time.monotonic()
        self.served = False

    def run(self) -> None:
        """Serve until the parent is gone."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while self.parent in (None, os.getppid()):
            watched: list[Any] = [self.listener, self.seen]
            ready, _, _ = select.select(watched, [], [], _PAUSE)
            if self.seen in ready:
                self._learn(os.read(self.seen, 1 << 16))
            if self.listener in ready:
                connection, _ = self.listener.accept()
                with connection, contextlib.suppress(OSError, ValueError, IndexError):
                    self._serve(connection)
            if self.other is not None and not Path(f"/proc/{self.other}").exists():
                sys.exit("the process from which apps are forked was killed, perhaps for memory")
            now = time.monotonic()
            if self.load == "start" and (self.served or now - self.began > _SUPEREXEC):
                self._load()
            if self.load == "message" and self.loaded and now - self.asked > IDLE:
                self._begin_anew()

    def preload(self, modules: tuple[str, ...] | list[str]) -> None:
        """Import modules for the children to come."""
        for module in modules:
            _preload(module)
        plugins.remember_plugins()
        clock.use_monotonic_clock()
        gc.collect()
        gc.freeze()

    def _learn(self, reports: bytes) -> None:
        """Import and prepare what children name, each in a line of JSON."""
        for line in reports.splitlines():
            # A child's report must not end what starts all others.
            with contextlib.suppress(Exception):
                report = json.loads(line)
                if "key" in report:  # whose file may be gone by now
                    path, degree = report["key"]
                    importlib.import_module(_KEYS).prepare_key(Path(path), degree)
                self.preload(report.get("modules", ()))

    def _load(self) -> None:
        if not self.loaded:
            self.loaded = True
            self.preload(_FIRST)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(10.0)  # a shim sends its request at once
        request, descriptors = _receive(connection)
        self.served = True
        if request["argv"][0] in shim.APPS:  # which need torch
            self.asked = time.monotonic()
            self._load()
        lacking = [module for module in self.later if module not in sys.modules]
        if os.fork() == 0:
            self.listener.close()
            os.close(self.seen)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.settimeout(None)
            _run(connection, request, descriptors, lambda: self._report(lacking))
        for descriptor in descriptors:
            os.close(descriptor)

    def _report(self, lacking: list[str]) -> None:
        """Name the modules that this child has imported, and the keys, that its server lacks."""
        used = [module for module in lacking if module in sys.modules]
        keys = sys.modules[_KEYS].unprepared() if _KEYS in sys.modules else []
        reports: list[dict[str, Any]] = [{"modules": used}] if used else []
        reports += [{"key": key} for key in keys[:_MOST_KEYS]]
        for report in reports:
            line = json.dumps(report).encode() + b"\n"
            if len(line) <= select.PIPE_BUF:  # so much is written in one piece
                os.write(self.report, line)

    def _begin_anew(self) -> None:
        """Replace this process, to release the memory of what it has imported."""
        self.listener.set_inheritable(True)
        what = ["-m", "bract.runtime.fork_server", "--on", str(self.listener.fileno())]
        os.execv(sys.executable, [*_PYTHON, *what])


def _preload(module: str) -> None:
    """Import a module, unless this installation has none of it: a site's has no server."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise


def _receive(connection: socket.socket) -> tuple[dict[str, Any], array.array[int]]:
    """Return a shim's request and its standard input, output and error."""
    descriptors = array.array("i")
    header, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * descriptors.itemsize))
    descriptors.frombytes(ancillary[0][2])
    with connection.makefile("rb") as file:
        return json.loads(file.read(int.from_bytes(header, "big"))), descriptors


def _run(
    connection: socket.socket,
    request: dict[str, Any],
    descriptors: array.array[int],
    report: Callable[[], None],
) -> None:
    code = 1
    try:
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        faulthandler.enable()  # a crash below Python leaves a trace in the log, too
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        connection.sendall(b"%d\n" % os.getpid())
        _seed_anew()
        # Brings Flower, which a server that has begun anew does without.
        from bract.runtime import flower

        try:
            flower.run(request["argv"][0])
            code = 0
        except SystemExit as stop:
            code = flower.exit_code(stop)
    except BractError as error:
        sys.stderr.write(f"{sys.argv[0]}: {error}\n")
    except BaseException:  # noqa: BLE001 - this process ends here, with the reason, as any would
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            report()
        try:
            connection.sendall(b"%d\n" % code)
        finally:
            os._exit(code)


def _seed_anew() -> None:
    """Seed what was seeded when it was imported: noise that repeats in every child is none.

    Python's own generator and those for keys, of OpenSSL and PyCryptodome, see to it themselves.
    """
    for module, seed in _SEEDED.items():
        if module in sys.modules:
            operator.attrgetter(seed)(sys.modules[module])()


def main(arguments: list[str]) -> None:
    """Serve on a path, on a socket that an earlier server left open, or beside a command."""
    if arguments[0] == "--beside":
        from bract.installed.flower import entry_point
        from bract.runtime import flower

        place, load, *command = arguments[1:]
        os.umask(UMASK)
        entry_point(command[0])
        start_beside(place, cast(Load, load))
        sys.argv[1:] = command
        flower.main()
    elif arguments[0] == "--on":
        listener = socket.socket(fileno=int(arguments[1]))
        _Server(listener, os.getppid(), later=(*_ALL, *_SELDOM), load="message").run()
    else:
        serve(arguments[0], parent=os.getppid() if "--with-parent" in arguments else None)


if __name__ == "__main__":
    main(sys.argv[1:])
