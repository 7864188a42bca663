"""Which federations a comparison runs: the same one undefended and under each defense."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bract.client.defenses import DEFENSES, DefenseChain, build_defenses
from bract.config import FederationConfig, build_config
from bract.data.views import data_spec
from bract.defenses.words import title
from bract.errors import BractError, shown
from bract.models import MODELS, create_model
from bract.parse.strict_yaml import parse_yaml
from bract.report.comparison.variants import UNDEFENDED

DEFAULT_DEFENSES: tuple[dict[str, Any], ...] = (
    {"name": "adadefense"},
    {"name": "guardian"},
    {"name": "fedkl"},
    {"name": "noise", "kind": "gaussian", "std": 0.01},
    {"name": "pruning"},
)
"""What is compared without ``--defense``; the same settings replace a bare ``noise``."""


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Attributes
    ----------
    configs
        One federation a variant; its name is the variant's. The undefended one comes first.
    notes
        Notes on them for the reader of the page.
    """

    configs: tuple[FederationConfig, ...]
    notes: tuple[str, ...] = ()


def plan(config: FederationConfig, defenses: Sequence[str] | None = None) -> Plan:
    """Lay out the variants: the configuration without defenses, then one for each defense.

    Where a defense cannot work with the configured model and the zoo has the same model with
    batch normalisation (``<model>-bn``), every variant uses that one, the undefended too: the
    normalisation must not count as the defense's effect. Without such a model the variant is
    kept, and fails with its own reason.

    Parameters
    ----------
    defenses
        ``NAME``, ``NAME:key=value,key=value``, or several joined by ``+`` for a chain. A bare
        name takes the settings that the configuration's own ``defenses`` give it. None compares
        `DEFAULT_DEFENSES` and the configuration's own.
    """
    config = config.as_own_word()
    own = {str(entry["name"]): entry for entry in config.defenses}
    if defenses:
        wanted = [(text, parse_defense(text, own)) for text in defenses]
    else:
        wanted = [
            (str(entry["name"]), [own.get(str(entry["name"]), entry)])
            for entry in DEFAULT_DEFENSES
            if entry["name"] in DEFENSES
        ]
        mine = "+".join(own)
        if own and mine not in dict(wanted):
            wanted.append((mine, [dict(entry) for entry in config.defenses]))
    chains = [build_defenses(entries) for _, entries in wanted]
    model, notes = _shared_model(config, chains, [title(entries) for _, entries in wanted])
    names = [UNDEFENDED]
    configs = [_variant(config, UNDEFENDED, [], model, None)]
    for (text, entries), chain in zip(wanted, chains, strict=True):
        names.append(_folder(text, names))
        configs.append(_variant(config, names[-1], entries, model, chain))
    return Plan(tuple(configs), tuple(notes))


def plan_variants(defenses: Sequence[str], *, clients: int, notes: Sequence[str] = ()) -> Plan:
    """Lay out the variants of an app that has no configuration: undefended, and each defense.

    Parameters
    ----------
    defenses
        As `plan` takes them.
    """
    names = [UNDEFENDED]
    configs = [build_config({"clients": clients, "name": UNDEFENDED})]
    for text in defenses:
        names.append(_folder(text, names))
        entries = [dict(entry) for entry in build_defenses(parse_defense(text, {})).public()]
        content = {"clients": clients, "name": names[-1], "defenses": entries}
        configs.append(build_config(content, source=f"variant {names[-1]}"))
    return Plan(tuple(configs), tuple(notes))


def parse_defense(text: str, own: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read ``guardian`` or ``adadefense:alpha=0.02+noise:std=0.05``.

    Parameters
    ----------
    own
        The configuration's entries by name, for names without settings.
    """
    entries: list[dict[str, Any]] = []
    for part in text.split("+"):
        name, colon, rest = part.strip().partition(":")
        if name not in DEFENSES:
            missing = DEFENSES.missing(name)
            raise BractError(f"--defense {shown(text)}: {missing}", code=missing.code)
        default = next((d for d in DEFAULT_DEFENSES if d["name"] == name), {"name": name})
        if not colon:
            entries.append(dict(own.get(name, default)))
            continue
        entry: dict[str, Any] = {"name": name}
        for item in rest.split(","):
            key, equals, value = item.partition("=")
            if not key.strip() or not equals:
                raise BractError(
                    f"--defense {shown(text)}: found {shown(item)}; "
                    "expected NAME:key=value,key=value",
                    code="usage",
                )
            try:
                entry[key.strip()] = parse_yaml(value)
            except BractError as error:
                raise BractError(
                    f"--defense {shown(text)}: {shown(key.strip())}: {error}", code=error.code
                ) from None
        entries.append(entry)
    return entries


def _shared_model(
    config: FederationConfig, chains: Sequence[DefenseChain], titles: Sequence[str]
) -> tuple[str, list[str]]:
    """Choose the model of every variant, with a note if it is not the configured one."""
    name = config.model.name
    normalised = f"{name}-bn"
    if normalised not in MODELS:
        return name, []
    need = [
        title
        for chain, title in zip(chains, titles, strict=True)
        if not _fits(config, name, chain) and _fits(config, normalised, chain)
    ]
    if not need:
        return name, []
    return normalised, [
        f"Model {name} has no normalisation layer, which {', '.join(need)} cannot do without: "
        f"every variant, the undefended one too, runs {normalised}."
    ]


def _fits(config: FederationConfig, name: str, chain: DefenseChain) -> bool:
    spec = data_spec(config.data)
    try:
        with torch.device("meta"):
            chain.prepare_model(
                create_model(
                    name,
                    classes=spec.classes,
                    channels=spec.image_shape[0],
                    image_size=spec.image_shape[1],
                    **spec.schemas,
                    activation=config.model.activation,
                )
            )
    except BractError:
        return False
    return True


def _variant(
    config: FederationConfig,
    name: str,
    defenses: Sequence[Mapping[str, Any]],
    model: str,
    chain: DefenseChain | None,
) -> FederationConfig:
    content = config.model_dump(mode="json")
    content |= {"name": name, "defenses": [dict(entry) for entry in defenses]}
    content["model"]["name"] = model
    content["capture"]["store"] = None  # every variant is attacked here
    if chain is not None and chain.server_lr != 1.0:
        content["strategy"]["server_lr"] = chain.server_lr
    return build_config(content, source=f"variant {name}")


def _folder(text: str, taken: Sequence[str]) -> str:
    """Return the folder of a variant: ``noise:std=0.05`` is kept in ``noise-std-0.05``."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")[:60] or "defense"
    if name in taken:
        raise BractError(
            f"--defense {shown(text)}: {name} is compared already; give it once", code="usage"
        )
    return name
