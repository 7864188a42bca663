"""Images of what entered a layer, by the reading that each update determines best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from bract.attacks.methods.inverting import InvertingAttack, left_of
from bract.attacks.methods.portfolio.ranking import is_better
from bract.attacks.methods.portfolio.side_by_side import side_by_side
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import OF_ONE_CASE
from bract.process import clock


class _Read(NamedTuple):
    """The reading of one trial by an attack."""

    method: InvertingAttack
    entered: Entered


def invert_best(problem: Problem, run: Run, methods: Sequence[InvertingAttack]) -> Outcome | None:
    """Invert what entered a layer, of trials whose captures tell it; None where none does.

    Every observation is read once by each attack. Trials whose best reading is one attack's are one
    batch with a checkpoint of its own.
    """
    begun = clock.now()
    read = _best_readings(problem, run, methods)
    problem.target_model.model.to(problem.device)
    alone: list[Outcome | None] = [None] * problem.trials
    names = list(dict.fromkeys(one.method.name for one in read if one is not None))
    for name in names:
        chosen = {trial: one for trial, one in enumerate(read) if one and one.method.name == name}
        method, trials = next(iter(chosen.values())).method, list(chosen)
        members = sha256(repr(trials).encode()).hexdigest()[:8]
        part = left_of(run.part(f"read-{members}", 0.0, 1.0, run.iterations), begun)
        whole = len(trials) == problem.trials
        given = problem if whole else problem.select(trials)
        entered = [one.entered for one in chosen.values()]
        found = method.certified(given, part, entered).made_by(name)
        if whole:
            return found
        for row, trial in enumerate(trials):
            alone[trial] = found.trial(row)
    return side_by_side(problem, alone)


def _best_readings(
    problem: Problem, run: Run, methods: Sequence[InvertingAttack]
) -> list[_Read | None]:
    """Return what the update of each trial determines best, of all that attacks read of it."""
    begun, best = clock.now(), list[_Read | None]([None] * problem.trials)
    for method in methods:
        spent = clock.now() - begun
        if run.seconds is not None and spent >= run.seconds:
            break
        left = replace(run, seconds=None if run.seconds is None else run.seconds - spent)
        if run.iterations is not None:
            left.iterations = min(run.iterations, method.iterations)
        cases = [_prepared(method, case) for case in problem.cases]
        suiting = [trial for trial, case in enumerate(cases) if case is not None]
        if not suiting:
            continue
        given = problem.select(suiting)
        given = replace(given, cases=tuple(case for case in cases if case is not None))
        for trial, entered in zip(suiting, method.read_each(given, left), strict=True):
            known = best[trial]
            before = None if known is None else known.entered.certificate
            if isinstance(entered, Entered) and is_better(entered.certificate, before):
                best[trial] = _Read(method, entered)
    return best


def _prepared(method: InvertingAttack, case: Case) -> Case | None:
    """Return a case as an attack reads it; None where it does not, or seeks more examples."""
    try:
        found = method.prepare(case)
    except OF_ONE_CASE:
        return None
    return found if found.images == case.images else None
