"""``bract compare``: one federation undefended and under each defense, attacked alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bract.cli.comparison_plan import Plan, plan
from bract.cli.console import print_json, say
from bract.cli.run import check_resumable
from bract.cli.signals import explained, resumed
from bract.client.defenses import build_defenses
from bract.config import FederationConfig
from bract.data.partition import partition_indices
from bract.data.sources import open_source
from bract.defenses.words import words_of
from bract.errors import BractError, RunFailedError
from bract.registry import unknown
from bract.report.comparison.comparison import write_comparison
from bract.report.comparison.variants import UNDEFENDED, ExampleCounts, Variant
from bract.rundir import RunDirectory

Train = Callable[[FederationConfig, Path], Path]
Step = Callable[[Path], object]


@dataclass(frozen=True)
class Steps:
    """The steps for each variant.

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

    @classmethod
    def of(
        cls,
        train: Train,
        *,
        resume: bool,
        redact: bool,
        tiers: Sequence[str],
        models: Collection[str],
        settings: Mapping[str, Any] | None = None,
    ) -> Steps:
        """Return the steps that attack in these tiers.

        Parameters
        ----------
        models
            References that the audit may import; training may add some.
        settings
            Keys of the audit section, and their values.
        """

        def audit(root: Path) -> None:
            from bract.cli.audit import audit_run
            from bract.cli.audit_requests import audit_requests

            for tier in dict.fromkeys(tiers):
                for request in audit_requests(root, settings, tier=tier, models=models):
                    audit_run(root, request, resume=resume)

        def report(root: Path) -> None:
            from bract.report import write_report

            with RunDirectory(root).claim():
                write_report(root, redact=redact)

        return cls(train=train, audit=audit, report=report)


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
        As `bract.cli.comparison_plan.plan` takes them.
    resume, overwrite
        Go on with, or replace, earlier runs of these variants.

    Raises
    ------
    BractError
        If a defense is unknown, a run directory is taken or was made with another configuration,
        or the undefended federation cannot even start.
    RunFailedError
        At the end, if a variant failed; the message names them all.
    """
    planned = plan(config, defenses)
    return compare_planned(
        planned,
        runs / f"{config.name}-compare",
        steps,
        name=config.name,
        tested=count_tested(planned.configs[0]),
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=as_json,
    )


def compare_planned(
    planned: Plan,
    root: Path,
    steps: Steps,
    *,
    name: str,
    tested: ExampleCounts,
    resume: bool,
    overwrite: bool,
    redact: bool,
    as_json: bool,
) -> Path:
    """Run, attack and compare planned variants; see `compare_defenses`.

    Parameters
    ----------
    root
        Folder of the variants' run directories, and of the page.
    name
        What is compared, for the page.
    """
    again = resumed("compare", "bract compare CONFIG --resume")
    with RunDirectory(root).claim(), explained(f"{root}; what is done is kept", again):
        _claim(root, planned, resume=resume, overwrite=overwrite)
        for note in planned.notes:
            say(note)
        outcome = _run_all(root, planned, steps)
        page = write_comparison(
            root, outcome.variants, name=name, tested=tested, notes=planned.notes, redact=redact
        )
    if as_json:
        print_json(json.loads((root / "comparison.json").read_text(encoding="utf-8")))
    say(f"comparison: {page}" if outcome.failed else f"done: {page}; next: open it in a browser")
    if outcome.failed:
        raise RunFailedError(
            f"{len(outcome.failed)} of {len(outcome.variants)} variants failed: "
            f"{', '.join(outcome.failed)}; --resume tries them again"
        )
    return page


def _claim(root: Path, planned: Plan, *, resume: bool, overwrite: bool) -> None:
    """See that every run directory is free, or is to be resumed or replaced."""
    held = {
        root / config.name: config
        for config in planned.configs
        if not RunDirectory(root / config.name).is_fresh
    }
    if resume:
        for folder, config in held.items():
            if RunDirectory(folder).is_configured:
                check_resumable(RunDirectory(folder), config)
    elif overwrite:
        for folder in held:
            run = RunDirectory(folder)
            with run.claim():
                run.clear()
    elif held:
        raise BractError(
            f"{root}: holds earlier runs ({', '.join(path.name for path in held)}); pass --resume "
            "to go on with them, --overwrite to replace them, or choose another name",
            code="file-taken",
        )


def check_tiers(tiers: Sequence[str]) -> None:
    """Refuse a tier that is none."""
    from bract.config.audit import TIERS

    known = (*TIERS, "all")
    strange = next((tier for tier in tiers if tier not in known), None)
    if strange is not None:
        raise BractError(unknown("tier", strange, known), code="unknown-name")


def command_steps(*, resume: bool, redact: bool, tiers: Sequence[str] = ("all",)) -> Steps:
    """Return the steps of ``bract run``, ``bract audit`` (once for each tier) and ``bract report``.

    Raises
    ------
    BractError
        If a tier is unknown.
    """
    from bract.cli.launch.launcher import Launch
    from bract.cli.run import run_federation

    check_tiers(tiers)
    models: set[str] = set()

    def train(config: FederationConfig, runs: Path) -> Path:
        # The operator named it, in the configuration that this command was given.
        models.update({config.model.name} if ":" in config.model.name else ())
        return run_federation(config, runs, Launch(), resume=resume).root

    return Steps.of(train, resume=resume, redact=redact, tiers=tiers, models=models)


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
            if config.name == UNDEFENDED and not _has_run(root / UNDEFENDED):
                raise
            error = str(problem)
        if error:
            say(f"{config.name} failed: {error}")
        defenses = tuple(build_defenses(config.defenses).public())
        outcome.variants.append(
            Variant(config.name, defenses, words_of(defenses, config.defenses), error)
        )
    for config in planned.configs:
        if (root / config.name / "config.yaml").is_file() or _has_run(root / config.name):
            steps.report(root / config.name)
    return outcome


def _has_run(folder: Path) -> bool:
    """Return whether a variant left anything of a round."""
    return (folder / "metrics.jsonl").exists() or any(folder.glob("captures/round-*"))


def count_tested(config: FederationConfig) -> ExampleCounts:
    """Count what accuracies are measured on: test examples, and each client's validation share."""
    labels = open_source(config.data, "train").labels
    shares = {}
    for client in range(config.clients):
        part = partition_indices(
            labels,
            config.data.partition,
            clients=config.clients,
            client=client,
            seed=config.seed,
        )
        shares[f"client-{client}"] = int(len(part) * config.data.validation)
    return ExampleCounts(test=len(open_source(config.data, "test").labels), validation=shares)
