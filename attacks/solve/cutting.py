"""Cut off what takes no notice of its time."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from bract.attacks.result import CutOffError


@contextlib.contextmanager
def cut_off_after(seconds: float) -> Iterator[None]:
    """Raise `CutOffError` in the block once it has run for so many seconds.

    A closed form or a step that never looks at the clock is so ended too, between two
    instructions of Python. In a thread other than the main one nothing is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

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
