"""Cut off what takes no notice of its time."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from bract.attacks.result import CutOffError
from bract.process import clock

AGAIN = 0.05
"""Seconds after which a cut is repeated that the block lost."""

SOONEST = 0.001
"""Least seconds of a timer: one of zero is none."""


@contextlib.contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raise `CutOffError` in the block once it has run for so many seconds.

    They are of the clock that `bract.process.clock` has for this thread. A closed form or a step
    that never looks at it is so ended too, between two instructions of Python: in the main thread
    by an alarm, in another one by a thread that watches it. A cut that Python drops, as it does
    with every error in a `__del__`, is repeated until the block ends. Whether gradients are
    recorded is as before afterwards: a cut may fall between two instructions of `torch.no_grad`
    itself.
    """
    in_main = threading.current_thread() is threading.main_thread()
    gradients = torch.is_grad_enabled()
    try:
        with (_by_alarm if in_main else _by_watching)(seconds):
            yield
    finally:
        torch.set_grad_enabled(gradients)


class _CutError(CutOffError):
    cuts: ClassVar[_Cuts]

    def __init__(self) -> None:
        super().__init__()
        self.cuts.note(self)


class _Cuts:
    """The cuts of one block: when there is to be one more.

    Attributes
    ----------
    error
        The block's own error, which notes each of its instances here.
    over
        Whether the block has ended: set in one instruction, which no cut can leave half done.
    """

    def __init__(self) -> None:
        self.over = False
        self._last: weakref.ref[CutOffError] | None = None
        # A class, since a thread is given one, and an instance is made when the thread meets it.
        self.error: type[CutOffError] = type("_CutError", (_CutError,), {"cuts": self})

    def note(self, cut: CutOffError) -> None:
        """Note a cut that was raised."""
        self._last = weakref.ref(cut)

    @property
    def due(self) -> bool:
        """Return whether the block runs on, and no cut is on its way up.

        An error on its way up or in an `except` is alive; one that was dropped is not.
        """
        return not self.over and (self._last is None or self._last() is None)


@contextlib.contextmanager
def _by_alarm(seconds: float) -> Iterator[None]:
    cuts, left = _Cuts(), _left(seconds)

    def cut(_: int, __: object) -> None:
        early = left()
        if early > 0.0 and not cuts.over:
            signal.setitimer(signal.ITIMER_REAL, max(early, SOONEST), AGAIN)
        elif cuts.due:
            raise cuts.error

    others, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
    begun = time.monotonic()
    earlier = signal.signal(signal.SIGALRM, cut)
    try:
        # A cut may fall between the end of the block and the first `over`; none comes after that.
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, SOONEST), AGAIN)
            yield
        finally:
            cuts.over = True
    finally:
        cuts.over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier)
        if others:
            rest = others - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(SOONEST, rest), interval)


@contextlib.contextmanager
def _by_watching(seconds: float) -> Iterator[None]:
    watched, cuts, left = ctypes.c_ulong(threading.get_ident()), _Cuts(), _left(seconds)
    lock, ended = threading.Lock(), threading.Lock()
    ended.acquire()

    def watch() -> None:
        wait = max(0.0, seconds)
        while not (ended.acquire(timeout=wait) or cuts.over):
            early = left()
            with lock:
                if cuts.due and early <= 0.0:
                    _raise_in(watched, ctypes.py_object(cuts.error))
            wait = max(early, AGAIN)

    try:
        try:
            threading.Thread(target=watch, daemon=True).start()
            yield
        finally:
            cuts.over = True
    finally:
        cuts.over = True
        with lock:
            _raise_in(watched, None)  # one that the thread has not met yet came too late
        ended.release()


def _left(seconds: float) -> Callable[[], float]:
    """Return a function that tells any thread how many seconds this one has left.

    Its clock may run slower than the wall's, by which timers are set, and is never faster.
    """
    watched = clock.current()
    end = watched() + seconds
    return lambda: end - watched()


def _raise_in(thread: ctypes.c_ulong, error: ctypes.py_object[type[BaseException]] | None) -> None:
    """Raise an error in a thread before its next instruction of Python; None takes it back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
