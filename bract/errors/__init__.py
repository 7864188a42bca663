"""The one error type whose message is written for the person at the keyboard."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, TypeVar

from bract.errors.codes import CODES
from bract.errors.foreign import ProcessEndError as ProcessEndError
from bract.errors.foreign import apart as apart
from bract.errors.foreign import contained as contained
from bract.errors.system import in_words as in_words
from bract.errors.system import text_of


class CodedError(Exception):
    """An error with a code of `bract.errors.codes.CODES`.

    Parameters
    ----------
    arguments
        The message.
    code
        In place of the class' own code.

    Raises
    ------
    TypeError
        If neither the class nor the caller gives a code of the table.
    """

    code: str = ""

    def __init__(self, *arguments: object, code: str | None = None) -> None:
        super().__init__(*arguments)
        if code is not None:
            self.code = code
        if self.code not in CODES:
            raise TypeError(f"{type(self).__name__}: code {self.code!r} is not in CODES")


class BractError(CodedError):
    """Bad input. The message names what was found, what was expected and the fix.

    It has no code of its own: every caller gives one. The command line prints the message as one
    line and exits with code 2.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # An error of another process comes as it is, whatever its class makes a message of.
        return BractError.__new__, (type(self), *self.args), vars(self)


_Error = TypeVar("_Error", bound=BractError)


def reworded(error: _Error, text: str) -> _Error:
    """Return an error of the same class, code and attributes with another message."""
    kind = type(error)
    found = kind.__new__(kind, text)
    vars(found).update(vars(error))
    return found


class SchemaError(BractError):
    """A file on disk has another schema version than this one reads."""

    code = "schema-version"


class RunFailedError(BractError):
    """Work that was asked for correctly did not finish. The command line exits with code 1."""

    code = "run-failed"


class RunStoppedError(RunFailedError):
    """`bract stop`, or another client of the SuperLink's control API, has stopped the run."""

    code = "run-stopped"

    def __init__(self, run_id: int | str, done: int, resume: str = "") -> None:
        how = f"; go on with `{resume}`" if resume else ""
        super().__init__(f"run {run_id} was stopped after round {done}{how}")


class WriteFailedError(RunFailedError):
    """A file cannot be written. The message names it, what was needed and what is free."""

    code = "write-failed"


class LeakageError(CodedError):
    """A gate crossed, or one that had nothing to judge; the command exits with code 3."""

    code = "gate-crossed"


class PrivacyAlarmError(CodedError):
    """A measured epsilon above the account's; the command exits with code 5."""

    code = "epsilon-exceeded"


class NothingAttackedError(CodedError):
    """An audit every attack of which was refused; the command exits with code 4."""

    code = "nothing-attacked"


_EXTRAS = {
    "sklearn": ("scikit-learn", "server"),
    "flwr_datasets": ("flwr-datasets", "server"),
    "datasets": ("flwr-datasets", "server"),
    "pyarrow": ("pyarrow", "server"),
    "fsspec": ("fsspec", "server"),
    "scipy": ("scipy", "audit"),
    "skimage": ("scikit-image", "audit"),
    "lpips": ("lpips", "audit"),
}
"""Packages that not every role installs: by module, the package and the extra that brings it."""


def not_installed(error: ImportError) -> BractError | None:
    """Return what to install where an error is of a package of another role; None for others."""
    module = _package(error)
    if module not in _EXTRAS:
        return None
    package, extra = _EXTRAS[module]
    return BractError(
        f"{package} is not installed; pip install 'bract[{extra}]'", code="package-missing"
    )


def missing_room(error: ImportError) -> str | None:
    """Return the sub-package of bract that this installation leaves out; None for other errors."""
    if _package(error) != "bract" or "." not in str(error.name):
        return None
    return ".".join(str(error.name).split(".")[:2])


def _package(error: ImportError) -> str:
    """Return the top package that is missing; empty where the error is of another kind."""
    missing = isinstance(error, ModuleNotFoundError) and isinstance(error.name, str)
    return str(error.name).partition(".")[0] if missing else ""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any library means that this process or a device lacks memory."""
    signs = ("out of memory", "allocate memory", "not enough memory", "bad_alloc", "failed to map")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError)
        and any(sign in text_of(error) for sign in signs)
    )


def one_line(text: object, most: int = 500) -> str:
    """Return untrusted text as one printable line of at most ``most`` characters.

    Text is taken as it reads, an error as `in_words` puts it, everything else as `shown` does.
    """
    if isinstance(text, BaseException):
        whole = in_words(text)
    else:
        whole = str(text) if isinstance(text, str | PurePath) else _Shortened().repr(text)
    line = " ".join(whole[: 4 * most].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= most else line[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its type where it says nothing."""
    return one_line(next(iter(in_words(error).splitlines()), ""), 200) or type(error).__name__


def printable(text: str) -> str:
    """Return text of several lines without what a terminal takes as a command, or for no letter.

    Those are control and formatting characters, such as escapes and turned directions.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in text)


_USER = re.compile(r"(?<=//)[^\s/'\"]*@")
_QUERY = re.compile(r"(://[^\s?#'\"]*)[?#][^\s'\"]*")


def without_credentials(text: object) -> str:
    """Return the first 4000 characters of text, its URLs without user, password, query, fragment.

    Signed links and passwords are in there; libraries' error texts repeat them.
    """
    return _QUERY.sub(r"\1", _USER.sub("", str(text)[:4000]))


def shown(value: object, most: int = 80) -> str:
    """Return a value that was found as it is written in Python, shortened, on one line.

    What is long, deep, wide or refers to itself costs no more than its beginning. A URL is shown
    without its credentials.
    """
    value = without_credentials(value) if isinstance(value, str) else value
    return one_line(_Shortened().repr(value), most)


def listed(problems: Iterable[str], most: int = 3) -> str:
    """Join the first problems of a list, and give the number of the others."""
    found = [one_line(problem, 110 if i else 300) for i, problem in enumerate(problems)]
    rest = len(found) - most
    return "; ".join(found[:most]) + (f"; and {rest} more" if rest > 0 else "")


class _Shortened(reprlib.Repr):
    """`reprlib.Repr`, also for what cannot be written.

    Such are whole numbers of too many digits, and objects whose own code raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 6
        self.maxstring = self.maxother = 200

    def repr1(self, x: Any, level: int) -> str:
        try:
            with contained():
                return super().repr1(x, level)
        except Exception:  # noqa: BLE001 - code of whoever wrote the class
            return f"a {type(x).__name__} that cannot be shown"

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"a whole number of about {int(x.bit_length() * 0.30103)} digits"
        return super().repr_int(x, level)
