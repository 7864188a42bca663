"""Run experiments: what is done stays, the cost is known before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch

from bract.disk import lock, readable_size
from bract.errors import BractError, RunFailedError, out_of_memory
from bract.installed.versions import code_digest, library_versions
from bract.parse import dump_json
from experiments.harness.data_folders import BY_PATH, SCENE_TEXT, Need
from experiments.harness.result import device_name, versions
from experiments.papers.declaration import Experiment, Scale, Size
from experiments.papers.estimate import Cost, cost, processor_seconds
from experiments.papers.results import (
    PaperResult,
    RowResult,
    Unit,
    finished_units,
    path_of,
    write_result,
)
from experiments.papers.runners import runner
from experiments.papers.runners.base import CODE, Context, Measured, Runner, Settings

MOST_HOURS: dict[Scale, float] = {"smoke": 0.1, "laptop": 4.0, "gpu": 72.0}
"""Hours above which an experiment is refused unless ``--max-hours`` allows more."""


@dataclass
class Plan:
    """One experiment at one scale, checked and estimated, before it starts.

    Attributes
    ----------
    settings
        Of each row, by name.
    keys
        Of each row's units.
    code
        Digest of the code that the units follow from.
    kept
        Units that are done already, by key.
    cost
        Of what is left.
    """

    experiment: Experiment
    scale: Scale
    runner: Runner[Any]
    settings: dict[str, Settings]
    keys: dict[str, list[str]]
    code: str
    kept: dict[str, Unit]
    cost: Cost = field(default=Cost(0.0, 0.0))

    @property
    def left(self) -> int:
        """Return the number of units that are to be measured."""
        return len({key for keys in self.keys.values() for key in keys} - set(self.kept))

    @property
    def whole(self) -> int:
        """Return the number of units."""
        return sum(len(keys) for keys in self.keys.values())


def plan(
    experiment: Experiment,
    scale: Scale,
    folder: Path,
    context: Context,
    *,
    max_hours: float | None = None,
    estimate: bool = True,
) -> Plan:
    """Check an experiment, find its finished units, and estimate the cost of the others.

    Raises
    ------
    BractError
        If the experiment has no such scale, a setting does not fit, a data set is not there, or
        what is left takes more hours or memory than there are.
    """
    check_runnable(experiment, scale)
    runs = runner(experiment.kind)
    settings: dict[str, Settings] = {}
    for row in experiment.rows_at(scale):
        where = f"{experiment.name}, row {row.name!r} at {scale}"
        settings[row.name] = runs.parse(experiment.settings_at(scale, row), where=where)
    for given in settings.values():
        need = runs.missing(given, context)
        if need is not None:
            raise BractError(without_data(experiment, scale, need), code="file-missing")
    code = code_digest(*CODE, *runs.code)
    keys = {
        name: [
            _key(experiment.kind, given, unit, code, context) for unit in range(runs.count(given))
        ]
        for name, given in settings.items()
    }
    wanted = {key for row in keys.values() for key in row}
    kept = {unit.key: unit for unit in finished_units(folder) if unit.key in wanted}
    made = Plan(experiment, scale, runs, settings, keys, code, kept)
    if estimate and made.left:
        made.cost = _estimate(made, context)
        _refuse_too_much(made, context, MOST_HOURS[scale] if max_hours is None else max_hours)
    return made


def check_runnable(experiment: Experiment, scale: Scale) -> None:
    """Refuse an experiment that has nothing to run at a scale, saying what it would take."""
    if scale in experiment.scales:
        return
    if experiment.kind == "diagram":
        raise BractError(f"{experiment.name} is a diagram; there is nothing to run", code="usage")
    has = ", ".join(experiment.scales) or "none"
    needs = f"; it would take {experiment.needs}" if experiment.needs else ""
    raise BractError(
        f"{experiment.name} has no scale {scale!r}; it has {has}{needs}", code="unknown-name"
    )


def without_data(experiment: Experiment, scale: Scale, need: Need) -> str:
    """Return what data is missing, where to put it, and what runs without it."""
    text = f"{experiment.name} at {scale}: {need}; --data names another folder"
    others = [
        name
        for name, size in experiment.scales.items()
        if name != scale and not _by_path(size, experiment)
    ]
    if others:
        lines = " or ".join(
            f"python -m experiments.papers run {experiment.name} --scale {s}" for s in others
        )
        return f"{text}. Without it: {lines}"
    return f"{text}. Without it this experiment cannot be run"


def _by_path(size: Size, experiment: Experiment) -> bool:
    names = {experiment.settings.get("data"), size.settings.get("data")}
    names |= {row.settings.get("data") for row in experiment.rows}
    if "data" in size.over:
        names = {size.over["data"]}
    return bool(names & {*BY_PATH, SCENE_TEXT})


def settings_digest(kind: str, given: Settings) -> str:
    """Return a digest of a row's settings, by which a result tells what it was run with."""
    text = dump_json({"kind": kind, "settings": given.model_dump(mode="json")})
    return sha256(text.encode()).hexdigest()[:16]


def _key(kind: str, given: Settings, unit: int, code: str, context: Context) -> str:
    about = dump_json(
        {
            "kind": kind,
            "settings": given.model_dump(mode="json"),
            "unit": unit,
            "code": code,
            "libraries": library_versions(),
            "device": context.device.split(":")[0],
        }
    )
    return sha256(about.encode()).hexdigest()[:24]


def _estimate(made: Plan, context: Context) -> Cost:
    seconds, memory = 0.0, 0.0
    counted: set[str] = set()
    for name, given in made.settings.items():
        left = {key for key in made.keys[name] if key not in made.kept} - counted
        if not left:
            continue
        counted |= left
        row = cost(given, context)
        seconds += row.seconds * len(left) / len(made.keys[name])
        memory = max(memory, row.memory)
    return Cost(seconds, memory)


def _refuse_too_much(made: Plan, context: Context, hours: float) -> None:
    name = f"{made.experiment.name} at {made.scale}"
    if made.cost.seconds > 3600.0 * hours:
        raise BractError(
            f"{name}: about {made.cost.seconds / 3600:.1f} hours for {made.left} of {made.whole} "
            f"units on {context.device}, at most {hours:g} are allowed; pass --max-hours "
            f"{made.cost.seconds / 3600 * 1.5:.1f}, a faster --device, or a smaller --scale",
            code="budget-spent",
        )
    free = _free(context)
    if made.cost.memory > free:
        raise BractError(
            f"{name}: about {readable_size(made.cost.memory)} of memory, "
            f"{readable_size(free)} are free on {context.device}; free some, or choose another "
            "--device or a smaller --scale",
            code="out-of-memory",
        )


def _free(context: Context) -> float:
    if context.device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(torch.device(context.device))[0])
    return float(psutil.virtual_memory().available)


Tell = Callable[[str], None]
"""Given the row of which a unit was measured."""


def run(
    made: Plan, folder: Path, context: Context, *, command: Sequence[str], tell: Tell | None = None
) -> Path:
    """Measure what is left, and write after every unit; return the result's path.

    Raises
    ------
    BractError
        If another process runs the same experiment into the same folder.
    RunFailedError
        If there is not enough memory; what is done is kept.
    """
    experiment, scale = made.experiment, made.scale
    path = path_of(folder, experiment, scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.with_name(f".{path.stem}.lock")
    with lock(held, what=str(path), doing=shlex.join(command)):
        # Another experiment may have measured the same meanwhile.
        made.kept |= {unit.key: unit for unit in finished_units(folder)}
        rows: dict[str, dict[int, Unit]] = {}
        for name, given in made.settings.items():
            units = rows.setdefault(name, {})
            for number, key in enumerate(made.keys[name]):
                fresh = key not in made.kept
                if fresh:
                    made.kept[key] = _measure(made, name, given, number, key, context)
                units[number] = made.kept[key]
                if fresh:
                    write_result(folder, experiment, _result(made, rows, command))
                    if tell is not None:
                        tell(name)
        write_result(folder, experiment, _result(made, rows, command))
    return path


def _measure(
    made: Plan, name: str, given: Settings, number: int, key: str, context: Context
) -> Unit:
    begun = processor_seconds()
    try:
        found: Measured = made.runner.run(given, number, context)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise RunFailedError(
            f"{made.experiment.name} at {made.scale}: out of memory in row {name!r}; what was "
            "finished is kept: run it again with a smaller `together`, or on another --device"
        ) from error
    return Unit(
        key=key,
        samples=tuple(found.samples),
        refused=tuple(found.refused),
        pictures=found.pictures,
        seconds=round(processor_seconds() - begun, 2),
        secret=found.secret,
    )


def _result(made: Plan, rows: Mapping[str, dict[int, Unit]], command: Sequence[str]) -> PaperResult:
    return PaperResult(
        experiment=made.experiment.name,
        scale=made.scale,
        command=shlex.join(command),
        device=device_name(),
        versions=versions(),
        code=made.code,
        rows=tuple(
            RowResult(
                name=name,
                count=len(made.keys[name]),
                settings=settings_digest(made.experiment.kind, made.settings[name]),
                units=units,
            )
            for name, units in rows.items()
            if units
        ),
    )
