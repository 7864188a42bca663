"""The command ``run``: plan every experiment that was named, then run them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bract.cli.console import WorkProgress, duration, print_json, say, working
from bract.cli.signals import explained
from bract.disk import readable_size
from bract.errors import BractError
from experiments.papers.catalog import experiments, find
from experiments.papers.declaration import Experiment, Scale
from experiments.papers.results import read_result
from experiments.papers.rules import obstacles_of, verdict
from experiments.papers.runners.base import Context, threads
from experiments.papers.running import Plan, check_runnable, plan, run
from experiments.papers.summary import judge_all

COMMAND = ["python", "-m", "experiments.papers", *sys.argv[1:]]
"""This command, as results name it."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    scale: Scale
    out: Path
    data: Path
    device: str
    threads: int
    max_hours: float | None
    dry_run: bool


def run_all(names: Sequence[str], options: Options, *, as_json: bool) -> None:
    """Run experiments; without names, or by a paper's name, those that have the scale.

    Raises
    ------
    BractError
        If one that was named cannot be run; nothing has begun then. Of those that were not named,
        one that cannot be run is left out with its reason.
    """
    check_device(options.device)
    context = Context(device=options.device, folder=options.data)
    chosen, named = _chosen(names, options.scale)
    plans: list[Plan] = []
    with threads(options.threads):
        for experiment in chosen:
            try:
                with working(f"{experiment.name} at {options.scale}: what it costs"):
                    made = plan(
                        experiment,
                        options.scale,
                        options.out,
                        context,
                        max_hours=options.max_hours,
                        estimate=options.scale != "smoke" or options.dry_run,
                    )
            except BractError as error:
                if experiment.name in named:
                    raise
                say(f"left out: {error}")
                continue
            say(_cost(made))
            plans.append(made)
        if options.dry_run:
            if as_json:
                print_json([_planned(made) for made in plans])
            return
        found = [_run(made, options, context) for made in plans]
    if as_json:
        print_json(found)
    if not plans:
        raise BractError(
            f"nothing of what was asked for can be run at scale {options.scale!r}", code="usage"
        )
    say(f"done: {options.out}; next: python -m experiments.papers report --results {options.out}")


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BractError(
            f"--device {device!r}: {str(error).splitlines()[0]}; choose cpu or a device that "
            "`bract doctor` lists",
            code="device-missing",
        ) from error


def _chosen(names: Sequence[str], scale: Scale) -> tuple[list[Experiment], set[str]]:
    found = find(names) if names else list(experiments().values())
    named = {name for name in names if "/" in name}
    for experiment in found:
        if experiment.name in named:
            check_runnable(experiment, scale)
    return [one for one in found if scale in one.scales], named


def _cost(made: Plan) -> str:
    text = f"{made.experiment.name} at {made.scale}: {made.left} of {made.whole} units to run"
    if made.cost.seconds:
        text += f", about {duration(made.cost.seconds)} and {readable_size(made.cost.memory)}"
    reduced = made.experiment.scales[made.scale].reduced
    return f"{text}; reduced: {reduced}" if reduced else text


def _planned(made: Plan) -> dict[str, object]:
    return {
        "experiment": made.experiment.name,
        "scale": made.scale,
        "units": made.whole,
        "left": made.left,
        "seconds": made.cost.seconds,
        "bytes": made.cost.memory,
    }


def _run(made: Plan, options: Options, context: Context) -> dict[str, object]:
    experiment, scale = made.experiment, made.scale
    again = shlex.join(COMMAND)
    with (
        explained(f"{options.out}; what is done is kept", again),
        WorkProgress(made.left, experiment.name) as bar,
    ):
        path = run(
            made,
            options.out,
            context,
            command=COMMAND,
            tell=lambda name: bar.finish_item(f"{experiment.name}: {name}"),
        )
    result = read_result(options.out, experiment, scale)
    assert result is not None
    judged = judge_all(experiment, scale, result)
    obstacles = obstacles_of(experiment, scale, result, judged)
    state = verdict(judged, obstacles)
    for reason in obstacles if scale != "smoke" else ():
        say(f"  {reason}")
    for one in judged:
        say(f"  {one.words}")
    if scale == "smoke":
        say(f"{experiment.name}: ran; smoke decides nothing")
    else:
        say(f"{experiment.name}: {state} at {scale}; {path}")
    return {
        "experiment": experiment.name,
        "scale": scale,
        "state": "ran" if scale == "smoke" else state,
        "file": str(path),
        "rules": [one.words for one in judged],
        "obstacles": obstacles,
    }
