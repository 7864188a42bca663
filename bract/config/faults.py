"""Faults that pydantic finds in what another party or a person wrote, in words with their key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from bract.errors import one_line, shown
from bract.registry import unknown

_ABOUT_KEYS = {"extra_forbidden", "missing", "union_tag_not_found"}


def code_of(error: Exception) -> str:
    """Return the code of a section that pydantic refuses, by the first problem."""
    problems = error.errors() if isinstance(error, ValidationError) else []
    about_keys = bool(problems) and problems[0]["type"] in _ABOUT_KEYS
    return "config-key" if about_keys else "config-value"


def fault(problem: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return one problem in words: an unknown key with the nearest, or what was found.

    Parameters
    ----------
    problem
        Of ``ValidationError.errors()``.
    keys
        Of the section that it is in, as `fields_at` returns them.
    """
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return unknown("key", where, [".".join([*location[:-1], key]) for key in keys])
    return f"{where}: found {shown(problem['input'])}; {problem['msg']}"


def fields_at(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """Return the fields of the section at a location, whether it is optional, listed or named."""
    for part in location:
        field = model.model_fields.get(str(part))
        annotation = None if field is None else field.annotation
        for one in (annotation, *get_args(annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                model = one
                break
    return list(model.model_fields)


def first_problem(error: ValidationError | RecursionError) -> str:
    """Return one line on where a record is wrong, what was found and what was expected."""
    if isinstance(error, RecursionError):
        return "something that is nested too deeply"
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    found, wanted = one_line(problem["input"], 80), one_line(problem["msg"], 200)
    return f"{one_line(where, 100)}: found {found}; {wanted}"
