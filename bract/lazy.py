"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Its public names stand once, in the stub ``__init__.pyi`` beside its ``__init__.py``, where type
    checkers read them: each as ``from MODULE import NAME as NAME``. A module is imported when one
    of its names is first asked for.

    Parameters
    ----------
    package
        The package's ``__name__``.
    """
    itself = sys.modules[package]
    stub = ast.parse(Path(str(itself.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    places = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    def listed() -> list[str]:
        return sorted({*vars(itself), *places})

    return sorted(places), found, listed
