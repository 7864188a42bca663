"""Name chains of defenses and their settings for pages, which import no defense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from bract.defenses.base import DEFENSES, DefenseSpec
from bract.schema.comparison import DefenseWords

Defense = Mapping[str, JsonValue]
"""A defense's name and settings, as a configuration holds them."""


def words_of(defenses: Sequence[Defense], given: Sequence[Defense] | None = None) -> DefenseWords:
    """Return what a page calls a chain of defenses.

    Parameters
    ----------
    defenses
        Name and every public setting of each.
    given
        The settings among them that were chosen; None for all.
    """
    kinds = [kind for kind in map(_spec, defenses) if kind is not None]
    return DefenseWords(
        title=title(defenses),
        settings=_chain(defenses if given is None else given),
        all_settings=_chain(defenses),
        locked=any(kind.keeps == "model" for kind in kinds),
    )


def title(defenses: Sequence[Defense]) -> str:
    """Return what to call a chain of defenses: ``AdaDefense + Gaussian noise``."""
    if not defenses:
        return "Undefended"
    return " + ".join(_title(defense) for defense in defenses)


def _title(defense: Defense) -> str:
    kind = _spec(defense)
    return str(defense.get("name")) if kind is None else kind.title_with(defense)


def _spec(defense: Defense) -> type[DefenseSpec] | None:
    """Return what is public of a defense; None for one that is not known here."""
    return DEFENSES.get(str(defense.get("name")))


def _chain(defenses: Sequence[Defense]) -> str:
    """Return a chain's settings in words, without the names and what the title holds already."""
    return "; ".join(filter(None, map(_settings, defenses)))


def _settings(defense: Defense) -> str:
    kind = _spec(defense)
    said = {"name"} | (kind.in_title() if kind is not None else set())
    return ", ".join(
        f"{key.replace('_', ' ')} {value}"
        for key, value in defense.items()
        if key not in said and value is not None
    )
