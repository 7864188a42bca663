"""Errors by code and the values that they name, not by their sentences."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from bract.errors import BractError, CodedError, codes


@contextlib.contextmanager
def refused(
    code: str, *values: object, kind: type[CodedError] = BractError
) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error with a code, whose message names every value.

    Parameters
    ----------
    code
        One of `bract.errors.codes.CODES`.
    values
        What the test put in or the person must see: names, numbers, paths, keys.
    kind
        Class of the error, which decides on the exit code.
    """
    assert code in codes.CODES
    with pytest.raises(kind) as error:
        yield error
    check_error(error.value, code, *values)


def check_error(error: BaseException, code: str, *values: object) -> None:
    """Check the code of an error, and that its message names every value."""
    assert isinstance(error, CodedError)
    assert error.code == code, f"{error.code}: {error}"
    check_named(str(error), *values)


def check_named(text: str, *values: object) -> None:
    """Check that a text names every value, wherever its lines break; a number as a whole."""
    plain = " ".join(text.split())
    missing = [str(value) for value in values if not _occurs(str(value), plain)]
    assert not missing, f"{missing} not in: {plain}"


def _occurs(value: str, text: str) -> bool:
    if value.isdigit():
        return re.search(rf"(?<!\d){value}(?!\d)", text) is not None
    return value in text


def check_refusal(found: object, code: str, *values: object) -> None:
    """Check that an attack refused an observation with a code, and that it names every value."""
    from bract.attacks import Refusal

    assert isinstance(found, Refusal), found
    assert found.code == code, f"{found.code}: {found.reason}"
    check_named(found.reason, *values)
