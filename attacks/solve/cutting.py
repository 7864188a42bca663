"""Cut off what takes no notice of its time."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator

import torch

from bract.attacks.result import CutOffError


@contextlib.contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raise `CutOffError` in the block once it has run for so many seconds.

    A closed form or a step that never looks at the clock is so ended too, between two
    instructions of Python: in the main thread by an alarm, in another one by a thread that
    watches it. Whether gradients are recorded is as before afterwards: a cut may fall between two
    instructions of `torch.no_grad` itself.
    """
    in_main = threading.current_thread() is threading.main_thread()
    gradients = torch.is_grad_enabled()
    try:
        with (_by_alarm if in_main else _by_watching)(seconds):
            yield
    finally:
        torch.set_grad_enabled(gradients)


@contextlib.contextmanager
def _by_alarm(seconds: float) -> Iterator[None]:
    def cut(_: int, __: object) -> None:
        raise CutOffError

    earlier = signal.signal(signal.SIGALRM, cut)
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier)
        if others:
            left = others - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left))


@contextlib.contextmanager
def _by_watching(seconds: float) -> Iterator[None]:
    watched = ctypes.c_ulong(threading.get_ident())
    lock, done = threading.Lock(), threading.Event()

    def cut() -> None:
        with lock:
            if not done.is_set():
                _raise_in(watched, ctypes.py_object(CutOffError))

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done.set()
        timer.cancel()


def _raise_in(thread: ctypes.c_ulong, error: ctypes.py_object[type[BaseException]]) -> None:
    """Raise an error in a thread before its next instruction of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
