"""Code of other packages and of a user's own module, which may not end the process."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Set
from types import TracebackType
from typing import Any

from bract.errors.system import in_words

_OWN = {"bract", "flwr", "ray"}
"""Packages that end the process where a signal or the SuperLink asks for it."""


class ProcessEndError(Exception):
    """Code of others raised what is to end the process, such as ``sys.exit()`` does."""


@contextlib.contextmanager
def contained(*packages: str) -> Iterator[None]:
    """Run code of others: what it raises to end the process is raised as an error.

    What ends the process for another reason passes: a signal that bract, Flower or Ray handles, or
    Ctrl-C where Python does; and a generator that is closed.

    Parameters
    ----------
    packages
        Further ones that may end the process.

    Raises
    ------
    ProcessEndError
        In the place of `SystemExit`, and of every other exception that is no `Exception`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        trace = sys.exc_info()[2]  # attributes of the error are the other code's
        if _asked_for(error, trace, _OWN.union(packages)):
            raise
        kind, reason = type(error).__name__, in_words(error)
        text = f"it raised {kind}{f' ({reason})' if reason else ''}, which would end the process"
        # With the frames of that code, so that its own line can be named.
        raise ProcessEndError(text).with_traceback(trace) from error


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Run code of others as `contained` does, and put back what it changed of the process.

    That is the working directory, the umask, the handlers of signals that end bract, the standard
    streams, warnings made errors, whether anything is logged, how deep calls may go, and PyTorch's
    default dtype, default device and recording of gradients. An app sets them for its own training;
    bract's own code rests on their defaults.

    Raises
    ------
    ProcessEndError
        As `contained`.
    """
    before, ends = _Process(), False
    try:
        with contained():
            yield
    except Exception:
        raise
    except BaseException:
        ends = True  # the signal's handler may have set another for the next one
        raise
    finally:
        before.put_back(handlers=not ends)


_UMASK = threading.Lock()

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Process:
    """State of this process that code of others may change."""

    def __init__(self) -> None:
        with _UMASK:  # it is read by setting it, for all threads
            self.umask = os.umask(0o077)
            os.umask(self.umask)
        self.folder: str | None = None
        with contextlib.suppress(OSError):  # it was removed
            self.folder = os.getcwd()  # noqa: PTH109 - as text, whatever it holds
        self.handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.streams = sys.stdin, sys.stdout, sys.stderr
        self.filters = list(warnings.filters)
        self.disabled = logging.root.manager.disable
        self.depth = sys.getrecursionlimit()
        torch = sys.modules.get("torch")
        self.dtype = None if torch is None else torch.get_default_dtype()
        device = None if torch is None else torch.get_default_device()
        self.device = None if device is None or device.type == "cpu" else device
        self.gradients = torch is None or torch.is_grad_enabled()

    def put_back(self, *, handlers: bool) -> None:
        """Set all of it again."""
        os.umask(self.umask)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        if handlers and threading.current_thread() is threading.main_thread():
            for number, handler in self.handlers.items():
                if handler is not None:  # else not Python's
                    signal.signal(number, handler)
        sys.stdin, sys.stdout, sys.stderr = self.streams
        # Libraries that are imported here add others, which their users need.
        filters: Any = warnings.filters
        for one in [one for one in filters if one[0] == "error" and one not in self.filters]:
            filters.remove(one)
        logging.disable(self.disabled)
        sys.setrecursionlimit(self.depth)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(self.dtype or torch.float32)
            if torch.get_default_device() != torch.device(self.device or "cpu"):
                torch.set_default_device(self.device)
            torch.set_grad_enabled(self.gradients)


def _asked_for(error: BaseException, trace: TracebackType | None, own: Set[str]) -> bool:
    """Return whether something else than the code of others ends the block."""
    if isinstance(error, KeyboardInterrupt):
        # Elsewhere a handler of its own turns Ctrl-C into another error.
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _package(type(error).__module__) in own:
        return True
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    # The frame of `contained` itself is bract's, as is that of the caller.
    frame = trace.tb_frame
    if isinstance(error, GeneratorExit) and frame.f_code.co_flags & inspect.CO_GENERATOR:
        return True
    return _package(frame.f_globals.get("__name__", "")) in own


def _package(module: object) -> str:
    return str(module).partition(".")[0]
