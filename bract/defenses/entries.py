"""Defenses as a configuration or a declaration lists them: a name and hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from torch import nn

from bract.defenses.base import DEFENSES, Defense, DefenseSpec
from bract.defenses.noise import Noise
from bract.errors import BractError, listed, shown
from bract.installed.plugins import elsewhere
from bract.registry import unknown

S = TypeVar("S", bound=DefenseSpec)


def read_defense(entry: Mapping[str, Any]) -> Defense:
    """Build one defense from its name and hyper-parameters; the rest has the defense's defaults."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise BractError(
            f"defenses: expected entries with a name, found {shown(entry)}", code="config-value"
        )
    return read_settings(DEFENSES[str(entry["name"])], entry)


def read_settings(kind: type[S], entry: Mapping[str, Any]) -> S:
    """Build one kind of defense from an entry, whose name counts as checked."""
    try:
        return kind(**{key: value for key, value in entry.items() if key != "name"})
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(unknown("hyper-parameter", where, kind.model_fields))
            elif where:
                lines.append(f"{where}: found {shown(problem['input'])}; {problem['msg']}")
            else:
                lines.append(problem["msg"])
        raise BractError(f"defense {kind.name!r}: {listed(lines)}", code="config-value") from error


def noise_index(chain: Sequence[Defense | type[Defense]]) -> int | None:
    """Return the place of the noise on which the privacy of a chain's updates rests.

    None where there is none, and where a defense after the noise needs the model, images or labels:
    it reads the data again, and no noise covers what it makes of them. Settings of the noise, such
    as no ``clip``, may still give no guarantee.
    """
    at = next((i for i, defense in enumerate(chain) if defense.name == Noise.name), None)
    if at is None or any(defense.needs for defense in chain[at + 1 :]):
        return None
    return at


def noise_entry(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the entry at `noise_index`, of defenses as a configuration lists them."""
    at = noise_index([DEFENSES[str(entry["name"])] for entry in entries])
    return None if at is None else entries[at]


def prepare_model(model: nn.Module, defenses: Iterable[Mapping[str, Any]]) -> nn.Module:
    """Apply what the declared defenses change in the model, in their order, in place.

    Parameters
    ----------
    defenses
        Name and hyper-parameters of each defense, as the protocol declares them. Those that
        change no model, and those that are not known here, are passed over.

    Returns
    -------
    nn.Module
        The model that server, clients and attackers share; it holds no client's secrets.

    Raises
    ------
    BractError
        If the model does not fit a defense, a declared hyper-parameter of one that changes the
        model is wrong, or the package of bract's that brings a defense is not installed.
    """
    for entry in defenses:
        known = DEFENSES.get(entry["name"])
        if known is None and entry["name"] in elsewhere("bract.defenses"):
            raise DEFENSES.missing(entry["name"])
        if known is not None and known.changes_model():
            model = read_defense(entry).prepare_model(model)
    return model
