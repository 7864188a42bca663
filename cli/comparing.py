"""``bract compare``: one federation undefended and under each defense, attacked alike."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from bract.cli.console import print_json, say
from bract.client.defenses import DEFENSES, DefenseChain, build_defenses
from bract.config import FederationConfig, build_config
from bract.data import data_spec, open_source, partition_indices
from bract.errors import BractError, RunFailedError
from bract.models import MODELS, create_model
from bract.registry import unknown
from bract.server.report.comparison import write_comparison
from bract.server.report.variants import UNDEFENDED, Variant, title

DEFAULT_DEFENSES: tuple[dict[str, Any], ...] = (
    {"name": "adadefense"},
    {"name": "guardian"},
    {"name": "fedkl"},
    {"name": "noise", "kind": "gaussian", "std": 0.01},
    {"name": "pruning"},
)
"""What is compared without ``--defense``; the same settings stand in for a bare ``noise``."""

Train = Callable[[FederationConfig, Path], Path]
Step = Callable[[Path], object]


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Attributes
    ----------
    configs
        One federation a variant; its name is the variant's. The undefended one comes first.
    notes
        What the reader of the page has to know about them.
    """

    configs: tuple[FederationConfig, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Steps:
    """What is done for each variant.

    Attributes
    ----------
    train
        Trains a federation below a folder and returns its run directory.
    audit, report
        Attack a run directory, and write its own report.
    """

    train: Train
    audit: Step
    report: Step


@dataclass
class _Outcome:
    variants: list[Variant] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [variant.name for variant in self.variants if variant.error]


def compare_defenses(
    config: FederationConfig,
    runs: Path,
    steps: Steps,
    *,
    defenses: Sequence[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    redact: bool = False,
    as_json: bool = False,
) -> Path:
    """Run, attack and compare; return the page's path, ``runs/<name>-compare/report.html``.

    A variant that fails is a row with its error; the others go on.

    Parameters
    ----------
    defenses
        As `plan` takes them.
    resume, overwrite
        Go on with, or replace, earlier runs of these variants.

    Raises
    ------
    BractError
        If a defense is unknown, a run directory is taken, or the undefended federation cannot
        even start.
    RunFailedError
        At the end, if a variant failed; the message names them all.
    """
    planned = plan(config, defenses)
    root = runs / f"{config.name}-compare"
    _claim(root, planned, resume=resume, overwrite=overwrite)
    for note in planned.notes:
        say(note)
    outcome = _run_all(root, planned, steps)
    page = write_comparison(
        root,
        outcome.variants,
        name=config.name,
        tested=tested_examples(planned.configs[0]),
        notes=planned.notes,
        redact=redact,
    )
    if as_json:
        print_json(json.loads((root / "comparison.json").read_text(encoding="utf-8")))
    say(f"comparison: {page}")
    if outcome.failed:
        raise RunFailedError(
            f"{len(outcome.failed)} of {len(outcome.variants)} variants failed: "
            f"{', '.join(outcome.failed)}; --resume tries them again"
        )
    return page


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

    Raises
    ------
    BractError
        If a defense or a setting of one is unknown, or a chain makes no sense.
    """
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


def parse_defense(text: str, own: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Read ``guardian`` or ``adadefense:alpha=0.02+noise:std=0.05``.

    Parameters
    ----------
    own
        The configuration's entries by name, for names without settings.

    Raises
    ------
    BractError
        If the text cannot be read, or names no defense.
    """
    entries: list[dict[str, Any]] = []
    for part in text.split("+"):
        name, colon, rest = part.strip().partition(":")
        if name not in DEFENSES:
            raise BractError(f"--defense {text!r}: {unknown('defense', name, DEFENSES)}")
        default = next((d for d in DEFAULT_DEFENSES if d["name"] == name), {"name": name})
        if not colon:
            entries.append(dict(own.get(name, default)))
            continue
        entry: dict[str, Any] = {"name": name}
        for item in rest.split(","):
            key, equals, value = item.partition("=")
            if not key.strip() or not equals:
                raise BractError(
                    f"--defense {text!r}: found {item!r}; expected NAME:key=value,key=value"
                )
            entry[key.strip()] = yaml.safe_load(value)
        entries.append(entry)
    return entries


def _shared_model(
    config: FederationConfig, chains: Sequence[DefenseChain], titles: Sequence[str]
) -> tuple[str, list[str]]:
    """Choose the model of every variant, and say so where it is not the configured one."""
    name = config.model.name
    normalised = f"{name}-bn"
    if normalised not in MODELS:
        return name, []
    need = [
        said
        for chain, said in zip(chains, titles, strict=True)
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
    if chain is not None and chain.server_lr != 1.0:
        content["strategy"]["server_lr"] = chain.server_lr
    return build_config(content, source=f"variant {name}")


def _folder(text: str, taken: Sequence[str]) -> str:
    """Return the folder of a variant: ``noise:std=0.05`` is kept in ``noise-std-0.05``."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")[:60] or "defense"
    if name in taken:
        raise BractError(f"--defense {text!r}: {name} is compared already; give it once")
    return name


def _claim(root: Path, planned: Plan, *, resume: bool, overwrite: bool) -> None:
    """See that every run directory is free, or is to be resumed or replaced."""
    held = [
        root / config.name
        for config in planned.configs
        if (root / config.name).is_dir() and any((root / config.name).iterdir())
    ]
    if overwrite:
        for folder in held:
            shutil.rmtree(folder)
    elif held and not resume:
        raise BractError(
            f"{root}: holds earlier runs ({', '.join(path.name for path in held)}); pass --resume "
            "to go on with them, --overwrite to replace them, or choose another name"
        )


def command_steps(*, resume: bool, redact: bool) -> Steps:
    """Return the steps of ``bract run``, ``bract audit`` and ``bract report``."""
    from bract.cli.auditing import audit_run, choose_audit
    from bract.cli.launcher import Launch
    from bract.cli.training import run_federation
    from bract.server.report import write_report

    return Steps(
        train=lambda config, runs: run_federation(config, runs, Launch(), resume=resume).root,
        audit=lambda root: audit_run(root, choose_audit(root), resume=resume),
        report=lambda root: write_report(root, redact=redact),
    )


def _run_all(root: Path, planned: Plan, steps: Steps) -> _Outcome:
    outcome = _Outcome()
    count = len(planned.configs)
    for number, config in enumerate(planned.configs, start=1):
        say(f"variant {number}/{count}: {config.name}")
        error = None
        try:
            run = steps.train(config, root)
            steps.audit(run)
        except RunFailedError as problem:
            error = str(problem)
        except BractError as problem:
            # Before anything ran, what the undefended federation cannot do, no variant can.
            if config.name == UNDEFENDED and not (root / UNDEFENDED / "metrics.jsonl").exists():
                raise
            error = str(problem)
        if error:
            say(f"{config.name} failed: {error}")
        outcome.variants.append(Variant(config.name, tuple(config.defenses), error))
    for config in planned.configs:
        if (root / config.name / "config.yaml").is_file():
            steps.report(root / config.name)
    return outcome


def tested_examples(config: FederationConfig) -> dict[str, int]:
    """Count what accuracies are measured on: test examples, and all clients' validation shares."""
    labels = open_source(config.data, "train").labels
    parts = [
        partition_indices(
            labels,
            config.data.partition,
            clients=config.clients,
            client=client,
            seed=config.seed,
        )
        for client in range(config.clients)
    ]
    return {
        "global": len(open_source(config.data, "test").labels),
        "clients": sum(int(len(part) * config.data.validation) for part in parts),
    }
