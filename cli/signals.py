"""Signals that end the command: name what was stopped, and how to go on."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the command to end. Notes that are added to it go to the person.

    No `KeyboardInterrupt`, which the parser of the command line keeps for itself.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    @property
    def code(self) -> int:
        """The exit code that a shell gives to a command that the signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        notes = getattr(self, "__notes__", None) or ["nothing is left half-written"]
        return f"stopped by {self.number.name}: {'; '.join(notes)}"


_asked: list[int] = []


def listen() -> None:
    """Turn the signals into `Stopped`, but for those that the caller has this command ignore."""
    _asked.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, _frame: object) -> None:
    _asked.append(number)
    raise Stopped(number)


def check() -> None:
    """Raise what a pending signal asked for; loops that last call it.

    Python drops what a signal raises where an object is just being finalised.

    Raises
    ------
    Stopped
        Where a signal came and the command goes on all the same.
    """
    if _asked:
        raise Stopped(_asked.pop())


def forget() -> None:
    """Take the signals that came as heard."""
    _asked.clear()


@contextlib.contextmanager
def explained(what: str, again: str) -> Iterator[None]:
    """Raise `Stopped` if a signal ends the block, with the signal and how to go on.

    A message from further inside is not replaced.
    """
    try:
        yield
    except Stopped as stopped:
        if not getattr(stopped, "__notes__", None):
            stopped.add_note(f"{what}; go on with `{again}`")
        raise


def resumed(command: str, otherwise: str) -> str:
    """Return how to go on: this command line once more with ``--resume``, if it is ``command``."""
    arguments = sys.argv[1:]
    if command not in arguments:
        return otherwise
    kept = [word for word in arguments if word not in ("--overwrite", "--resume")]
    return shlex.join(["bract", *kept, "--resume"])
