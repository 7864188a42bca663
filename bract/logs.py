"""Log lines of bract's own apps, which run in processes that Flower starts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bract.permissions import open_private

FIRST_SECONDS = 5.0
"""Work that takes less says nothing of how far it is; more does about as often."""


def log_to_stderr() -> None:
    """Send the records of bract from INFO on to stderr, unless somebody has set up logging."""
    logger = logging.getLogger("bract")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the records of bract from INFO on to a file while the block runs.

    Flower throws away what a ServerApp writes to stderr, but for what `flwr log` fetches.
    """
    logger = logging.getLogger("bract")
    level = logger.level
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT))
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


def log_progress(logger: logging.Logger, what: str) -> Callable[[int, int], None]:
    """Return a function that logs how much of long work is done.

    Parameters
    ----------
    what
        The work, as it begins a line: ``round 3: encryption``.

    Returns
    -------
    Callable
        Takes (items done, items in total). It logs every `FIRST_SECONDS` and then the end; work
        that is shorter logs nothing.
    """
    started = told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        long = told > started
        if now - told >= FIRST_SECONDS or (long and done == total):
            told = now
            logger.info("%s: %d of %d ciphertexts, %.0f s", what, done, total, now - started)

    return tell
