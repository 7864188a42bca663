"""Which code may be imported by name: the one place that decides, and the one that imports it.

A run's configuration, a message, a capture and a file may name code, ``package.module:attribute``,
and each of them may come from another party. Such a name stays plain text, which is looked up in a
registry and nowhere else. It becomes a `TrustedReference`, which alone can be imported, where the
person who runs this process vouches for it: on the command line, in his own configuration, or in
the site's own file.
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bract.errors import (
    BractError,
    CodedError,
    ProcessEndError,
    apart,
    contained,
    first_line,
    one_line,
    out_of_memory,
    shown,
)


class TrustedReference(str):
    """``package.module:attribute`` for which the person who runs this process vouches.

    Made by `own_word` and `vouched` only. Text that is parsed or validated is never one, so trust
    does not survive a file or a message.
    """

    __slots__ = ()


def is_reference(name: str) -> bool:
    """Return whether a name is of code to import, rather than of a registry's entry."""
    return ":" in name


def own_word(name: str) -> str:
    """Return what the person who runs this process named, trusted where it is a reference."""
    return TrustedReference(name) if is_reference(name) else name


def vouched(name: str, allowed: Collection[str], *, what: str, how: str) -> str:
    """Return a name from another party, trusted where the allow-list holds it.

    Parameters
    ----------
    allowed
        The references for which the person who runs this process vouches.
    what
        What is named ("model"), for the error.
    how
        How to vouch for it, for the error.
    """
    if not is_reference(name):
        return name
    if name in allowed:
        return TrustedReference(name)
    raise BractError(
        f"{what} {shown(name)} is code that would be imported and called here, and another party "
        f"named it; take a registered name, or, if you trust that code, {how}",
        code="code-untrusted",
    )


def check_reference(name: str) -> str:
    """Return a reference as it is, refusing with ValueError what is none."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ValueError(
            f"{shown(name)}: expected package.module:callable, such as my_app.task:Net"
        )
    return name


def import_reference(reference: TrustedReference, *, what: str, keeps: bool = False) -> Any:
    """Import what a trusted reference names.

    Parameters
    ----------
    what
        What is imported ("model"), for the error.
    keeps
        Whether what its module sets of the process stays: an app sets it for its own training.
    """
    if not isinstance(reference, TrustedReference):
        raise TypeError(f"{what} {shown(reference)}: not vouched for, so not imported")
    module_name, _, attributes = reference.partition(":")
    _imported.add(module_name.partition(".")[0])
    try:
        with contained() if keeps else apart():
            found: Any = importlib.import_module(module_name)
            for attribute in attributes.split("."):
                found = getattr(found, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BractError(
            f"{what} {shown(reference)} cannot be imported ({one_line(error, 200)}); "
            "expected package.module:attribute on the Python path, or in the current folder",
            code="import-failed",
        ) from error
    except Exception as error:
        raise BractError(
            f"{what} {shown(reference)} cannot be imported: its module raised "
            f"{type(error).__name__}: {one_line(error, 200)}",
            code="import-failed",
        ) from error
    return found


_imported: set[str] = set()
"""Top packages of what this process imported by name."""


@contextlib.contextmanager
def naming_their_line(*packages: str) -> Iterator[None]:
    """Turn what code that was imported by name raises into one line that names its own.

    For a whole command: where bract calls that code on purpose, it says more.

    Parameters
    ----------
    packages
        Those that may end the process besides bract and Flower.

    Raises
    ------
    BractError
        In the place of any error with a frame of that code but `CodedError` and lack of memory.
    """
    try:
        with contained(*packages):
            yield
    except CodedError:
        raise
    except Exception as error:
        where = _their_line(error)
        if out_of_memory(error) or not (where or isinstance(error, ProcessEndError)):
            raise
        kind = "" if isinstance(error, ProcessEndError) else f"{type(error).__name__}: "
        raise BractError(
            f"{where or 'code of another package'}: {kind}{first_line(error)}; correct it, it is "
            "no code of bract's",
            code="model-faulty",
        ) from error


def _their_line(error: Exception) -> str:
    """Return file and line of the last frame of code that was imported by name; else nothing."""
    place = ""
    # A generator has made another error of one that was to end it.
    of = error if error.__cause__ is None else error.__cause__
    for frame, line in traceback.walk_tb(of.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _imported - {"bract"}:
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return place
