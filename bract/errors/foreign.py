"""Code of other packages and of a user's own module, which may not end the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from bract.errors.system import in_words

_OWN = {"bract", "flwr"}
"""Packages that end the process where a signal or the SuperLink asks for it."""


class ProcessEndError(Exception):
    """Code of others raised what is to end the process, such as ``sys.exit()`` does."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Run code of others: what it raises to end the process is raised as an error.

    `KeyboardInterrupt` and `GeneratorExit` pass, and so does what bract or Flower raises when a
    signal comes while the code runs.

    Raises
    ------
    ProcessEndError
        In the place of `SystemExit`, and of every other exception that is no `Exception`.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if _raised_by(error.__traceback__).partition(".")[0] in _OWN:
            raise
        kind, reason = type(error).__name__, in_words(error)
        text = f"it raised {kind}{f' ({reason})' if reason else ''}, which would end the process"
        # With the frames of that code, so that its own line can be named.
        raise ProcessEndError(text).with_traceback(error.__traceback__) from error


def _raised_by(trace: TracebackType | None) -> str:
    """Return the module of the innermost frame."""
    name = ""
    while trace is not None:
        # The frame of `contained` itself is bract's, as is that of who calls the code of others.
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
