"""Check an attack's settings against its fields: names, types and ranges.

A range is part of a field's annotation, as `Rate` is; the classes declare it, this module applies
it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from bract.errors import BractError, shown
from bract.registry import unknown

Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
"""A learning rate, a scale or a tolerance."""

Weight = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
"""A weight of a term in a loss; 0 leaves the term out."""

Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A share of a whole."""

Count = Annotated[int, Field(ge=1)]
"""A number of steps, starts or units."""

ScheduleName = Literal["step", "constant", "cosine"]
"""A key of `bract.attacks.solve.optimizers.SCHEDULES`."""

_CHECKS: WeakKeyDictionary[type, dict[str, TypeAdapter[Any]]] = WeakKeyDictionary()


def check_settings(kind: type[Any], settings: Mapping[str, object]) -> None:
    """Check the settings that an attack is built with.

    Parameters
    ----------
    kind
        The attack's class, a dataclass with a ``name``.
    settings
        By name of a field.

    Raises
    ------
    BractError
        If a name is no field of the class, or a value is of another type or outside its range; it
        names the attack, the setting, what was found and what is expected.
    """
    known = [f.name for f in fields(kind) if f.init]
    checks = _checks(kind)
    for key, value in settings.items():
        if key not in known:
            raise BractError(
                unknown(f"setting of attack {kind.name!r}", key, known), code="config-key"
            )
        if key not in checks:
            continue
        try:
            checks[key].validate_python(value, strict=True)
        except ValidationError:
            expected = _words(_hints(kind)[key])
            raise BractError(
                f"attack {kind.name}: {key} is {shown(value)}; expected {expected}",
                code="config-value",
            ) from None


def _checks(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return the checks of a class' fields; a field whose annotation cannot be checked has none."""
    if kind in _CHECKS:
        return _CHECKS[kind]
    config = ConfigDict(arbitrary_types_allowed=True)
    found = _CHECKS.setdefault(kind, {})
    for name, hint in _hints(kind).items():
        try:
            found[name] = TypeAdapter(hint, config=config)
        except (PydanticUserError, SchemaError, TypeError):
            continue
    return found


def _hints(kind: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, written in vars(base).get("__annotations__", {}).items():
            # One by one: a name that is imported for type checkers alone costs its own field.
            alone = type("Alone", (), {"__annotations__": {name: written}})
            space = vars(sys.modules[base.__module__]) | {"ClassVar": ClassVar}
            try:
                hints |= get_type_hints(alone, globalns=space, include_extras=True)
            except (NameError, TypeError, AttributeError):
                hints.pop(name, None)
    own = {f.name for f in fields(kind) if f.init}
    return {name: hint for name, hint in hints.items() if name in own}


def _words(hint: Any) -> str:
    """Return what an annotation admits, in words: type and range."""
    if get_origin(hint) is Annotated:
        return _range(_words(hint.__origin__), hint.__metadata__)
    if get_origin(hint) is Literal:
        return " or ".join(repr(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        each = _words(inner[0])
        return f"a tuple of {each}" + ("" if Ellipsis in inner else f" each, {len(inner)} of them")
    plain: dict[Any, str] = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "a text",
        type(None): "None",
    }
    return plain.get(hint, f"an instance of {getattr(hint, '__name__', hint)}")


def _range(kind: str, metadata: tuple[Any, ...]) -> str:
    words = {"gt": "above {:g}", "ge": "{:g} or more", "lt": "below {:g}", "le": "at most {:g}"}
    said = [kind]
    for one in metadata:
        for bound in getattr(one, "metadata", ()):
            said += [w.format(getattr(bound, k)) for k, w in words.items() if hasattr(bound, k)]
    return ", ".join(said)
