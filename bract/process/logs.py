"""Log lines of bract's own apps, which run in processes that Flower starts."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from bract.disk.permissions import open_private
from bract.errors import one_line

MOST_BYTES = 16 << 20
"""Bytes of a log after which it is begun anew."""

KEPT = 3
"""Earlier parts of a log that are kept."""

UNSENT = "the server is sent no reason:"
"""Between client and reason in the line of a client's log whose reason stays at its site."""

FIRST_SECONDS = 5.0
"""Work that takes less shows no progress; more shows it about as often."""


def log_to_stderr() -> None:
    """Send the records of bract from INFO on to stderr, unless logging is set up already."""
    logger = logging.getLogger("bract")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def rotate(path: Path, *, most: int = MOST_BYTES, kept: int = KEPT) -> None:
    """Move a log of over ``most`` bytes to ``<name>.1``, and earlier parts on, up to ``kept``.

    Processes that append to the log go on doing so: its content is copied and then cut, so what is
    written in between is lost. The parts are as private as the log.
    """
    try:
        if path.stat().st_size <= most:
            return
        parts = [path.with_name(f"{path.name}.{number}") for number in range(1, kept + 1)]
        for older, newer in zip(parts[:0:-1], parts[-2::-1], strict=True):
            if newer.exists():
                newer.replace(older)
        os.close(open_private(parts[0], os.O_WRONLY | os.O_CREAT))
        shutil.copyfile(path, parts[0])
        os.truncate(path, 0)
    except FileNotFoundError:
        return
    except OSError as error:
        logging.getLogger(__name__).warning("%s: not rotated: %s", path, one_line(error, 300))


class _PrivateLog(RotatingFileHandler):
    """A log whose parts are private from their first byte on."""

    def _open(self) -> TextIOWrapper:
        os.close(open_private(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT))
        return super()._open()


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the records of bract from INFO on to a file while the block runs.

    Flower throws away what a ServerApp writes to stderr, but for what `flwr log` fetches.
    """
    logger = logging.getLogger("bract")
    level = logger.level
    handler = _PrivateLog(path, maxBytes=MOST_BYTES, backupCount=KEPT, encoding="utf-8")
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
    started = reported = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        long = reported > started
        if now - reported >= FIRST_SECONDS or (long and done == total):
            reported = now
            logger.info("%s: %d of %d ciphertexts, %.0f s", what, done, total, now - started)

    return tell
