"""Choose the chains of defenses that a search tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bract.attacks import has_attacker
from bract.client.defenses import build_defenses
from bract.config import FederationConfig
from bract.data.views import data_spec
from bract.defenses import DEFENSES, configured_model, title
from bract.errors import BractError

Entry = dict[str, Any]
"""A defense by ``name``, with a value or a range of values for each hyper-parameter."""

Chains = list[list[str | Entry]]


def app_chains() -> tuple[Chains, list[str]]:
    """Return the chains that run in an app without a change of its code, and the other defenses."""
    return _chains(
        lambda name: DEFENSES[name].keeps != "model" and not DEFENSES[name].changes_model()
    )


def default_chains(base: FederationConfig) -> tuple[Chains, list[str]]:
    """Return the chains that a model of the space can have, and notes on what was left out."""

    def fits(name: str) -> bool:
        try:
            build_defenses([{"name": name}])
            check_model(base.model_copy(update={"defenses": [{"name": name}]}))
        except BractError:
            return False
        return True

    chains, left = _chains(fits)
    if base.defenses:
        chains.append([dict(entry) for entry in base.defenses])
    if not left:
        return chains, []
    return chains, [
        f"Not searched: {', '.join(left)}, which model {base.model.name} lacks the layers for; "
        "name a model that has them in model.name of the space."
    ]


def _chains(usable: Callable[[str], bool]) -> tuple[Chains, list[str]]:
    """Return the chains of the usable defenses, and the names of the others."""
    chains: Chains = [[], [_NOISE], [_PRUNING], [_PRUNING, _NOISE]]
    left: list[str] = []
    for name in DEFENSES:
        if name in ("noise", "pruning", "per-example"):
            continue
        if usable(name):
            chains += _attacked({"name": name} | _TRIED.get(name, {}))
        else:
            left.append(name)
    return chains, left


def _attacked(entry: Entry) -> Chains:
    """Return a defense alone, with noise and with pruning, where an adaptive attacker knows it."""
    name = str(entry["name"])
    chains: Chains = [[entry]] if has_attacker([name]) else []
    for last in (_NOISE, _PRUNING):
        if has_attacker([name, str(last["name"])]):
            chains.append([entry, last])
    return chains


_NOISE: Entry = {
    "name": "noise",
    "clip": 1.0,
    "std": {"low": 3e-4, "high": 0.1, "log": True},
}


_PRUNING: Entry = {"name": "pruning", "ratio": {"low": 0.5, "high": 0.99}}


_TRIED: dict[str, Entry] = {
    "adadefense": {
        "alpha": {"low": 2e-3, "high": 0.05, "log": True},
        "secret_updates": {"low": 0, "high": 8, "whole": True},
    },
    "guardian": {"min_cosine": {"low": 0.1, "high": 0.7}},
    "soteria": {"ratio": {"low": 0.2, "high": 0.8}},
    "truncated-svd": {"energy": {"low": 0.3, "high": 0.95}},
}
"""Ranges of other defenses' hyper-parameters; one without an entry has its defaults."""


def check_model(config: FederationConfig) -> None:
    """Refuse defenses that need what the model lacks."""
    with torch.device("meta"):
        configured_model(config, data_spec(config.data))


def chain_name(position: int, chain: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a chain among those of a space, which begins with its position."""
    names = " + ".join(str(entry.get("name")) for entry in chain) or "none"
    return f"{position}: {names}"


def describe(config: FederationConfig) -> str:
    """Return what a candidate's chain is called on the page."""
    return title(build_defenses(config.defenses).public())
