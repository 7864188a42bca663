"""Names of a package that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``, whose public names lie in other modules.

    Parameters
    ----------
    package
        The package's ``__name__``.
    places
        The module of each name, imported when the name is first asked for. Type checkers read the
        same names below ``TYPE_CHECKING`` or in a stub file.
    """

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return found
