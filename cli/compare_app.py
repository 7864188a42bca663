"""``bract compare APP``: a third-party app undefended and under each defense, attacked alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bract.audit.captures import Capture, Captures
from bract.captures.stores import LATEST, OWNER, runs_in
from bract.cli.compare import Steps, check_tiers, compare_planned
from bract.cli.comparison_plan import DEFAULT_DEFENSES, Plan, plan_variants
from bract.cli.launch.own_app import OwnAppFederation
from bract.client.defenses import DEFENSES, build_defenses
from bract.config import FederationConfig
from bract.disk.files import write_text
from bract.errors import BractError, RunFailedError
from bract.installed.app_folder import App
from bract.report.comparison.variants import ExampleCounts
from bract.rundir import RunDirectory
from bract.schema.description import DESCRIPTION, AppDescription
from bract.schema.description_text import dump_description
from bract.schema.inputs import is_redacted

SECONDS = 120
"""Wall time of the audit of one variant in one tier."""


def compare_app(
    app: App,
    runs: Path,
    *,
    defenses: Sequence[str] | None = None,
    tiers: Sequence[str] = ("all",),
    resume: bool = False,
    overwrite: bool = False,
    redact: bool | None = None,
    as_json: bool = False,
) -> Path:
    """Run an app undefended and under each defense in Flower's simulation engine, and compare.

    The app has the hook around its strategy and `DefenseMod` among its mods, and was run, captured
    and described once: ``bract.yaml`` of its latest run describes every variant, and there are as
    many clients as that run captured.

    Raises
    ------
    BractError
        If the app was not described, or a defense is unknown.
    RunFailedError
        At the end, if a variant failed; the message names them all.
    """
    check_tiers(tiers)
    described = described_app(app)
    redact = is_redacted(redact, described.inputs)
    planned = _plan(described.clients, defenses)

    def train(config: FederationConfig, root: Path) -> Path:
        return described.train(config, root / config.name, resume=resume)

    return compare_planned(
        planned,
        runs / f"{app.name}-compare",
        Steps.of(
            train,
            resume=resume,
            redact=redact,
            tiers=tiers,
            models=described.models,
            settings={"rounds": [1], "total_seconds": float(SECONDS)},
        ),
        name=app.name,
        tested=ExampleCounts(),
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=as_json,
    )


@dataclass(frozen=True)
class DescribedApp:
    """An app whose latest run was captured and described, which runs with other defenses.

    Attributes
    ----------
    clients
        How many clients that run captured.
    inputs
        The inputs that they declare, as described.
    models
        References ``package.module:callable`` that an audit of it imports.
    """

    app: App
    description: AppDescription
    clients: int
    inputs: frozenset[str]
    models: frozenset[str]

    def train(self, config: FederationConfig, root: Path, *, resume: bool = False) -> Path:
        """Run the app with a configuration's defenses, and leave a run directory; return it.

        Parameters
        ----------
        resume
            Keep the captures of an earlier run there.

        Raises
        ------
        RunFailedError
            If nothing was captured, or the clients applied other defenses.
        """
        run = RunDirectory(root)
        if not (resume and run.captures.is_dir()):
            _run_variant(self.app, run, config)
        write_text(root / DESCRIPTION, dump_description(_of_any_run(self.description)))
        return root


def described_app(app: App) -> DescribedApp:
    """Return an app with its description.

    Raises
    ------
    BractError
        If its latest run was not described.
    """
    try:
        run = RunDirectory.open(app.folder)
        description = run.description()
    except BractError:
        description = None
    if description is not None:
        captured = Captures(run.captures).index
        return DescribedApp(
            app,
            description,
            clients=len({capture.client for capture in captured}),
            inputs=frozenset(inputs_of(description, captured)),
            models=frozenset(m for m in [description.model] if m and ":" in m),
        )
    raise BractError(
        f"{app.folder}: no described run of the app {app.name}; run it once with the hook around "
        f"its strategy, and describe it: bract describe {app.folder} --model my_app.task:Net",
        code="captures-none",
    )


def _plan(clients: int, defenses: Sequence[str] | None) -> Plan:
    """Lay out the variants; by default those that need no line of the app's own code."""
    names = list(defenses or ())
    notes = [
        f"Attacked was round 1 of each variant, for {SECONDS // 60} minutes a tier; audit the run "
        "directory of a variant for more."
    ]
    if not names:
        left: list[str] = []
        for entry in DEFAULT_DEFENSES:
            if entry["name"] in DEFENSES:
                needs = build_defenses([entry]).keeps_model
                (left if needs else names).append(str(entry["name"]))
        if left:
            notes.append(
                f"Not compared: {', '.join(left)}, which changes the model and needs a line in the "
                "app; name it with --defense once the app has that line."
            )
    return plan_variants(names, clients=clients, notes=notes)


def _run_variant(app: App, run: RunDirectory, config: FederationConfig) -> None:
    """Run one variant, and leave its captures and truth in its run directory."""
    defense = "off" if not config.defenses else json.dumps(list(config.defenses))
    with OwnAppFederation(app.folder, run, config.clients, defense) as federation:
        federation.finish()
    found = runs_in(run.captures)
    if not found:
        raise RunFailedError(
            "nothing was captured: wrap the strategy of the app's server, with a relative store: "
            'HonestButCurious(strategy, store="captures")',
            code="captures-none",
        )
    _flatten(run.captures, found[0])
    applied = {
        tuple(str(d.get("name")) for d in c.declaration.defenses)
        for c in Captures(run.captures).index
    }
    wanted = tuple(str(entry["name"]) for entry in config.defenses)
    if applied != {wanted}:
        raise RunFailedError(
            f"the clients applied {' or '.join(', '.join(a) or 'no defense' for a in applied)}, "
            f"expected {', '.join(wanted) or 'none'}: the app's client needs "
            'ClientApp(mods=[DefenseMod("adadefense")]), whose defense a comparison replaces'
        )


def _flatten(store: Path, folder: Path) -> None:
    """Make one run's captures those of a run directory."""
    for path in folder.iterdir():
        path.rename(store / path.name)
    (store / OWNER).unlink(missing_ok=True)
    (store / LATEST).unlink(missing_ok=True)
    folder.rmdir()


def _of_any_run(description: AppDescription) -> AppDescription:
    """Return a description without what holds for the nodes and the defenses of one run."""
    guessed = {k: v for k, v in description.guessed.items() if not k.startswith("clients.")}
    return description.model_copy(update={"clients": {}, "defenses": None, "guessed": guessed})


def inputs_of(description: AppDescription, captures: Iterable[Capture]) -> set[str]:
    """Return which inputs the clients declare, with what is described laid over it."""
    return {description.declare(c.declaration, c.client, c.round).input for c in captures}
