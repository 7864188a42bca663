"""How every experiment stands: its declaration, its best result, its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.papers.catalog import experiments
from experiments.papers.declaration import SCALES, Experiment, Published, Row, Scale
from experiments.papers.results import COMMITTED, PaperResult, path_of, read_result
from experiments.papers.rules import Figure, Judged, State, figure, judge, obstacles_of, verdict
from experiments.papers.runners import runner
from experiments.papers.running import settings_digest


@dataclass(frozen=True)
class RowFigures:
    """A row's figures and the published ones.

    Attributes
    ----------
    ours
        By metric, those that were measured.
    theirs
        Printed and converted figures, one mapping for each of the row's published lines.
    """

    row: Row
    ours: dict[str, Figure]
    theirs: list[tuple[Published, dict[str, float | None]]]
    refused: int
    pictures: str | None


@dataclass(frozen=True)
class Standing:
    """How one experiment stands.

    Attributes
    ----------
    scale
        Of the result that counts: the largest that is whole; smoke decides nothing.
    judged
        What each rule came to.
    folder
        Where the result lies.
    obstacles
        Why nothing is decided, where that is so.
    """

    experiment: Experiment
    state: State
    scale: Scale | None
    result: PaperResult | None
    judged: tuple[Judged, ...]
    folder: Path
    obstacles: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        """Return the result's file."""
        if self.scale is None:
            return None
        return path_of(self.folder, self.experiment, self.scale)

    @property
    def why(self) -> list[str]:
        """Return the outcome of the rules, and what the rest would take to run."""
        if self.result is not None:
            return [*self.obstacles, *(one.words for one in self.judged)]
        return [self.experiment.needs] if self.experiment.needs else []

    @property
    def stand_in(self) -> bool:
        """Return whether the result is of a model, data set or task that stands for the paper's."""
        return self.scale is not None and self.experiment.scales[self.scale].stand_in

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that some row has a figure of."""
        return tuple(
            metric
            for metric in self.experiment.metrics
            if any(metric in row.ours or any(metric in v for _, v in row.theirs)
                   for row in self.rows)
        )  # fmt: skip

    @property
    def rows(self) -> list[RowFigures]:
        """Return every row with its figures."""
        rows = []
        for row in self.experiment.rows:
            found = self.result.row(row.name) if self.result is not None else None
            ours = {m: figure(found, m) for m in self.experiment.metrics}
            units = [] if found is None else [found.units[i] for i in sorted(found.units)]
            rows.append(
                RowFigures(
                    row=row,
                    ours={name: value for name, value in ours.items() if value is not None},
                    theirs=[(p, self.experiment.converted(p)) for p in row.published],
                    refused=sum(len(unit.refused) for unit in units),
                    pictures=next((u.pictures for u in units if u.pictures), None),
                )
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return what ``python -m experiments.papers list --format json`` prints."""
        return {
            "paper": self.experiment.paper,
            "experiment": self.experiment.name,
            "number": self.experiment.number,
            "title": self.experiment.title,
            "state": self.state,
            "stand_in": self.stand_in,
            "obstacles": list(self.obstacles),
            "claims": [claim.model_dump(exclude_defaults=True) for claim in self.experiment.claims],
            "scale": self.scale,
            "scales": list(self.experiment.scales),
            "needs": self.experiment.needs,
            "result": None if self.result is None else {
                "file": str(self.file),
                "reduced": self.experiment.scales[self.result.scale].reduced,
                "rules": [
                    {"says": one.rule.says, "answer": one.answer, "found": one.words}
                    for one in self.judged
                ],
                "rows": [
                    {
                        "row": row.row.name,
                        "beyond_the_paper": row.row.beyond,
                        "ours": {
                            name: {
                                "mean": value.mean,
                                "low": value.low,
                                "high": value.high,
                                "groups": value.groups,
                            }
                            for name, value in row.ours.items()
                        },
                        "theirs": [{"of": printed.of, **values} for printed, values in row.theirs],
                    }
                    for row in self.rows
                ],
            },
        }  # fmt: skip


def stand(experiment: Experiment, folder: Path = COMMITTED) -> Standing:
    """Judge one experiment by the largest scale that is whole.

    Raises
    ------
    BractError
        If a result's file is none.
    """
    for scale in reversed(SCALES):
        if scale == "smoke" or scale not in experiment.scales:
            continue
        result = read_result(folder, experiment, scale)
        if result is None or not _whole(experiment, scale, result):
            continue
        judged = judge_all(experiment, scale, result)
        obstacles = obstacles_of(experiment, scale, result, judged)
        state = verdict(judged, obstacles)
        return Standing(experiment, state, scale, result, judged, folder, tuple(obstacles))
    if experiment.kind == "diagram":
        state = "nothing to run"
    else:
        state = "not run" if "laptop" in experiment.scales else "needs"
    return Standing(experiment, state, None, None, (), folder)


def judge_all(experiment: Experiment, scale: Scale, result: PaperResult) -> tuple[Judged, ...]:
    """Hold every rule that applies at a scale against a result."""
    rows = {row.name: row for row in experiment.rows_at(scale)}
    found = []
    for rule in experiment.rules:
        named = [getattr(rule, key, None) for key in ("row", "more", "less", "to")]
        if any(name is not None and name not in rows for name in named):
            continue
        data = None
        if getattr(rule, "row", None) in rows:
            data = experiment.settings_at(scale, rows[rule.row]).get("data")  # type: ignore[union-attr]
        one = judge(experiment, rule, result, data)
        if one is not None:
            found.append(one)
    return tuple(found)


def _whole(experiment: Experiment, scale: Scale, result: PaperResult) -> bool:
    """Return whether every row is there, run with the settings that are declared."""
    for declared in experiment.rows_at(scale):
        row = result.row(declared.name)
        if row is None or not row.whole:
            return False
        given = runner(experiment.kind).parse(
            experiment.settings_at(scale, declared), where=f"{experiment.name}, {declared.name}"
        )
        if row.settings not in (None, settings_digest(experiment.kind, given)):
            return False
    return True


def stand_all(folder: Path = COMMITTED) -> list[Standing]:
    """Return how every experiment stands."""
    return [stand(experiment, folder) for experiment in experiments().values()]
