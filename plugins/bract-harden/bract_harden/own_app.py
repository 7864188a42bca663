"""``bract harden .``: what a third-party app could change without a change of its code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bract.cli.audit import audit_all_tiers
from bract.cli.compare_app import DescribedApp, described_app
from bract.config import FederationConfig, build_config
from bract.errors import BractError
from bract.installed import App, app_in
from bract_harden.chains import app_chains
from bract_harden.configuration import HardenOptions, harden_with
from bract_harden.space import Space
from bract_harden.space_file import SpaceFile, read_space
from bract_harden.study import load_optuna
from bract_harden.work import here

SECONDS = 60.0
"""Wall time of one audit of an app, in the first two stages and under the full attack."""


class InFlower:
    """The app in Flower's simulation engine, with other defense mods, and the audits of it."""

    def __init__(self, app: DescribedApp) -> None:
        self._app = app

    def train(self, config: FederationConfig, root: Path) -> float | None:
        """Run the app; its seconds are not CPU seconds, so none are returned."""
        self._app.train(config, root)
        return None

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Attack in all tiers that apply."""
        audit_all_tiers(root, settings, models=self._app.models)


def harden_app(folder: Path, runs: Path, options: HardenOptions) -> Path:
    """Search the defenses of an app that has the hook and `DefenseMod`, and was described once.

    Raises
    ------
    BractError
        If the folder holds no app, the app was not described, or a cluster is named: Flower's
        engine has a Ray of its own, and runs one federation of the app after the other.
    """
    if options.ray is not None:
        raise BractError(
            f"--ray {options.ray}: an app's federations run one after the other in Flower's own "
            "simulation engine; leave --ray out",
            code="usage",
        )
    load_optuna()
    app = app_in(folder)
    if app is None:
        raise BractError(
            f"{folder}: holds no Flower app; name a configuration, or the folder of an app that "
            "was captured and described",
            code="file-missing",
        )
    described = described_app(app)
    found = options.limit(_space(app, described.clients, options.space))
    root = runs / f"{app.name}-harden"
    return harden_with(found, root, here(InFlower(described)), options, inputs=described.inputs)


def _space(app: App, clients: int, path: Path | None) -> Space:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", app.name).strip("-._")[:64] or "app"
    base = build_config({"name": name, "clients": clients})
    file = SpaceFile() if path is None else read_space(path)
    if file.space:
        raise BractError(
            f"{path}: space names {next(iter(file.space))}, which the app's own code decides; vary "
            "it in the app, and leave space out",
            code="config-conflict",
        )
    chains, left = app_chains()
    content = file.model_dump() | {"space": {}}
    content["defenses"] = chains if file.defenses is None else file.defenses
    short = {"rounds": [1], "total_seconds": SECONDS}
    for stage in ("cheap", "middle", "full"):
        content["search"][stage] = short | content["search"][stage]
    found = Space(
        base, SpaceFile.model_validate(content), source=str(path or "the app"), models=False
    )
    found.notes += [
        "Searched was what needs no change of the app: the defenses of its DefenseMod.",
        f"{', '.join(left)} would need a line in the app, which prepares the model alike at server "
        "and clients (docs/guide/your-own-app.md).",
        "Batch size, local steps, learning rate and the model are in the app's own code, and "
        "encrypted aggregates need bract's strategy and client; none of them was searched.",
        "The accuracy of the app is not known to the search; judge it by the app's own.",
    ]
    return found
