"""What a rule needs: the Flower whose source was read, and something to replace in it.

A rule of this room replaces a function inside Flower by its name, so it holds for that release and
for no other: any other is refused before anything starts, and so is one that lacks the name.
"""

from __future__ import annotations

import importlib
from typing import Any

from bract.errors import BractError
from bract.flower import REQUIREMENT, SERIES, installed, is_supported


def check_version() -> None:
    """Refuse a Flower that is not the one whose source was read."""
    found = installed()
    if not is_supported(found):
        raise BractError(
            f"Flower {found or 'none'} is installed, and the rules for its processes are those of "
            f"{' and '.join(SERIES)}; pip install '{REQUIREMENT}'",
            code="flower-version",
        )


def replace(module: str, name: str, new: object) -> Any:
    """Put ``new`` in the place of ``module.name`` and return what was there."""
    holder = importlib.import_module(module)
    if not hasattr(holder, name):
        raise BractError(
            f"{module}.{name} is not in Flower {installed()}: a rule of bract would not hold, "
            f"so the process does not start; pip install '{REQUIREMENT}'",
            code="flower-version",
        )
    old = getattr(holder, name)
    setattr(holder, name, new)
    return old
