"""Images of one-image updates that a closed form reads off."""

from __future__ import annotations

from collections.abc import Sequence

from bract.attacks.base import Attack
from bract.attacks.methods.portfolio.ranking import found
from bract.attacks.methods.portfolio.side_by_side import side_by_side
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS, closed_forms
from bract.attacks.result import Trial
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import OF_ONE_CASE

_SHARE = 0.3
"""Most of a budget in seconds that closed forms take, in addition to the other stages."""


def read_off(problem: Problem, run: Run, attacks: Sequence[Attack]) -> Outcome | None:
    """Read off what closed forms explain; trials of one observation share the result.

    Parameters
    ----------
    attacks
        Closed forms for one image, in the order in which they are tried.

    Returns
    -------
    Outcome or None
        Infinite losses for trials that none explains; None where it explains no trial.
    """
    seconds = None if run.seconds is None else _SHARE * run.seconds / problem.trials
    read: dict[int, Outcome | None] = {}
    for trial, case in enumerate(problem.cases):
        if (seen := id(case.observation)) not in read:
            alone = problem.select([trial])
            tried = (_explained(one, alone, seconds) for one in attacks)
            read[seen] = next((outcome for outcome in tried if outcome is not None), None)
    return side_by_side(problem, [read[id(case.observation)] for case in problem.cases])


def is_read_off(case: Case, trials: Sequence[Trial]) -> bool:
    """Return whether a closed form for one image explains an update."""
    tried = [trial for trial in trials if trial.attack in of_one_image()]
    return any(
        found(one.attack, one.loss, one.determined, smooth=case.target_model.traits.smooth)
        for one in tried
    )


def of_one_image() -> list[str]:
    """Return the closed forms that need one image alone, and so explain the whole update."""
    return [
        name
        for name in closed_forms()
        if ATTACKS[name].batches == "one" and issubclass(ATTACKS[name], Attack)
    ]


def _explained(method: Attack, problem: Problem, seconds: float | None) -> Outcome | None:
    """Return what a closed form reads off one trial; None where it does not explain it."""
    try:
        method.prepare(problem.cases[0])
        made = method.solve(problem, Run(iterations=None, seconds=seconds))
    except OF_ONE_CASE:
        return None
    smooth, known = problem.target_model.traits.smooth, made.certificates[0]
    kept = found(method.name, float(made.losses[0]), known, smooth=smooth)
    return made.made_by(method.name) if kept else None
