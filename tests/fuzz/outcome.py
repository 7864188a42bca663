"""Feed one input to one parser, and say what came of it: accepted, refused, or a fault."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from bract.errors import BractError

SECONDS = 2.0
"""Processor time that one input may take; time, unlike on the clock, does not grow with load."""

MEMORY = 1 << 30
"""Bytes by which one input may raise the process' largest resident size."""

MOST_MESSAGE = 600
"""Characters of an error's message, without the folder of the test that it names."""


class FaultError(AssertionError):
    """A parser did what it must not."""


class TooSlowError(BaseException):
    """One input took longer than `SECONDS`; no handler of the parser's own may catch it."""


@dataclass(frozen=True)
class Parser:
    """One reader of what somebody else wrote.

    Attributes
    ----------
    name
        What tests and tables call it.
    inputs
        Draws what it is given.
    read
        Reads one input; the second argument is an empty folder of its own.
    errors
        What it may raise beside `BractError`.
    room
        The module that holds it.
    """

    name: str
    inputs: SearchStrategy[Any]
    read: Callable[[Any, Path], object]
    room: str
    errors: tuple[type[Exception], ...] = ()
    examples: int = 150


@dataclass
class Tally:
    """How many inputs one parser took, refused or failed on."""

    counts: Counter[str] = field(default_factory=Counter)

    def feed(self, parser: Parser, value: Any) -> None:
        try:
            self.counts[outcome(parser, value)] += 1
        except FaultError:
            self.counts["other"] += 1
            raise


def outcome(parser: Parser, value: Any) -> str:
    """Return ``accepted`` or ``refused``.

    Raises
    ------
    FaultError
        For any other exception, more than `SECONDS` or `MEMORY`, a message that is too long or has
        line breaks, and a file, process or connection outside of the test's folder.
    """
    with _folder() as folder, _watched(folder) as touched, _muted():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with _limited():
                parser.read(value, folder)
            found = "accepted"
        except (BractError, *parser.errors) as error:  # type: ignore[misc]  # mypy sees no tuple
            text = str(error).replace(str(folder), "")
            if len(text) > MOST_MESSAGE or "\n" in text:
                raise FaultError(f"a message of {len(text)} characters: {text[:300]!r}") from None
            found = "refused"
        except (Exception, TooSlowError) as error:  # noqa: BLE001 - which one is the finding
            where = "".join(traceback.format_exception(error)[-6:])
            raise FaultError(f"{type(error).__name__}: {str(error)[:300]}\n{where}") from None
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > MEMORY:
            raise FaultError(f"took {grown >> 20} MiB")
    if touched:
        raise FaultError(f"touched {touched[0]}")
    return found


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_fast()) as name:
        yield Path(name)


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _muted() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


_WATCHING: list[tuple[str, list[str]]] = []
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2,
}
_NEVER = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHING:
        return
    folder, touched = _WATCHING[-1]
    paths: tuple[Any, ...] = ()
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        paths = arguments[:1]
    elif event in _PATHS and all(number == -1 for number in arguments[-1:]):
        # Relative to an open folder, as `shutil.rmtree` does, is where that folder is.
        paths = arguments[: _PATHS[event]]
    elif event.startswith(_NEVER):
        touched.append(f"{event} {arguments!r}"[:300])
    elif event == "import" and "bract_fuzz_canary" in str(arguments[0]):
        touched.append(f"import {arguments[0]}")
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike) and not isinstance(path, int):
            real = os.path.realpath(os.fsdecode(path))
            if (
                not real.startswith((folder, "/dev/null"))
                and not real.endswith(".pyc")
                and "__pycache__" not in real
            ):
                touched.append(f"{event} {real}")


sys.addaudithook(_hook)


@contextmanager
def _watched(folder: Path) -> Iterator[list[str]]:
    touched: list[str] = []
    _WATCHING.append((os.path.realpath(folder), touched))
    try:
        yield touched
    finally:
        _WATCHING.pop()
