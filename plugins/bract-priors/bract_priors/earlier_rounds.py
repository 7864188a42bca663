"""Reconstruct a client's earlier rounds first: their gradients make the state of its defense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bract.attacks import Case, Evidence, Known, Problem, Reconstruction, Refusal
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import forward_model
from bract.attacks.task import OF_ONE_CASE, AttackTask
from bract.captures.observation import Observation
from bract.process.clock import now
from bract.updates.update import Tensors

EARLIER = "earlier_rounds"
"""Name of the note on which earlier rounds were reconstructed, and what stopped it."""

Attacking = Callable[[Sequence[Case], AttackTask], list[Reconstruction | Refusal]]
"""Attack cases within a task, one entry a case."""


def in_order_of_rounds(
    cases: Sequence[Case], task: AttackTask, attacking: Attacking, *, wanted: Sequence[bool]
) -> list[Reconstruction | Refusal]:
    """Attack cases, those that are wanted so after their earlier rounds; see `after_earlier`.

    Parameters
    ----------
    attacking
        Attacks cases as they are.
    wanted
        For which cases earlier rounds are reconstructed; the others get the whole budget.
    """
    if not any(wanted):
        return attacking(cases, task)
    begun = now()
    places = range(len(cases))
    alone, after = ([i for i in places if wanted[i] is take] for take in (False, True))
    cut = len(alone) / len(cases)
    results: dict[int, Reconstruction | Refusal] = {}
    if alone:
        first = replace(task, engine=task.engine.within(0.0, cut, begun))
        results |= zip(alone, attacking([cases[i] for i in alone], first), strict=True)
    rest = replace(task, engine=task.engine.within(cut, 1.0, begun))
    ready, left = after_earlier([cases[i] for i in after], rest, attacking)
    results |= zip(after, attacking(ready, left), strict=True)
    return [results[i] for i in places]


def after_earlier(
    cases: Sequence[Case], task: AttackTask, attacking: Attacking
) -> tuple[list[Case], AttackTask]:
    """Reconstruct earlier rounds from a client's first on, each with the state of those before.

    Clients' rounds at one place in their order run as one batch. Where one cannot be attacked, or
    rounds before the first captured one are missing, the client's further ones are left: what was
    reconstructed stays, and the note `EARLIER` of the case's evidence gives the reason.

    Returns
    -------
    tuple
        The cases, with `Known.earlier`; and the task that is left for them: an equal part of its
        seconds and of its progress for every round of the longest history.
    """
    begun = now()
    found = [_noting(case, **_gaps(case)) for case in cases]
    longest = max(len(case.known.history) for case in cases)
    if task.budget.seconds is not None:
        share = task.budget.seconds / (longest + 1)
        task = replace(task, budget=replace(task.budget, seconds=share))
    going = list(range(len(found)))
    for position in range(longest):
        opened: dict[int, Case] = {}
        for number in going:
            rounds = _by_round(found[number])
            if position >= len(rounds):
                continue
            try:
                opened[number] = _opened(found[number], rounds, position, task)
            except OF_ONE_CASE as error:
                found[number] = _noting(found[number], left=str(error))
        low, high = (place / (longest + 1) for place in (position, position + 1))
        part = replace(task, engine=task.engine.within(low, high, begun))
        results = attacking(list(opened.values()), part) if opened else []
        for (number, case), result in zip(opened.items(), results, strict=True):
            found[number] = _with_round(found[number], case, result)
        going = [number for number in opened if len(found[number].known.earlier) == position + 1]
    last = longest / (longest + 1)
    return found, replace(task, engine=task.engine.within(last, 1.0, begun))


def simulated_gradient(seen: Observation, found: Reconstruction, *, unroll: int) -> Tensors:
    """Return the gradient that a client makes of reconstructed images, before any defense.

    Parameters
    ----------
    seen
        What was captured of the client in that round.
    unroll
        As the attack had it.

    Returns
    -------
    Tensors
        float32 on the CPU, by the names of the upload and in its order, scaled like
        `Observation.gradient`.
    """
    trial = found.trials[found.chosen]
    images = len(trial.images)
    client = forward_model(seen.declaration, images=images, unroll=unroll)

    def bare(observation: Observation, known: Known) -> Evidence:
        del known
        return Evidence(target=observation.gradient(), forward=client)

    case = open_case(seen, tier="oblivious", max_images=images, unroll=unroll, view=bare)
    problem = Problem.stack([(case, trial.restart)], seed=found.seed, device=torch.device("cpu"))
    made = problem.simulate(
        trial.images[None].to(problem.dtype),
        trial.label_probabilities[None].to(problem.dtype),
        {name: value[None].to(problem.dtype) for name, value in trial.unknowns.items()},
    )
    return {name: made[name][0].detach() for name in seen.update}


def _by_round(case: Case) -> list[Observation]:
    return sorted(case.known.history, key=lambda seen: seen.round)


def _gaps(case: Case) -> dict[str, Any]:
    """Return what is assumed of rounds without an upload between those that were captured."""
    seen = [*(one.round for one in _by_round(case)), case.observation.round]
    gaps = sorted(set(range(seen[0], seen[-1])) - set(seen))
    if not gaps:
        return {}
    rounds = ", ".join(map(str, gaps))
    return {"assumed": f"the client took no part in rounds without a capture: {rounds}"}


def _opened(case: Case, rounds: list[Observation], position: int, task: AttackTask) -> Case:
    return open_case(
        rounds[position],
        tier=case.tier,
        known=replace(case.known, history=rounds[:position]),
        max_images=task.budget.max_images,
        unroll=case.unroll,
        public=case.public,
    )


def _with_round(case: Case, opened: Case, result: Reconstruction | Refusal) -> Case:
    """Return the case with one more reconstructed round, or with the reason why there is none."""
    if isinstance(result, Refusal):
        return _noting(case, left=result.reason)
    spent = replace(case, seconds=case.seconds + result.seconds)
    missing = result.settings["evidence"].get("missing_rounds")
    if missing:
        return _noting(
            spent,
            left=f"{opened.observation.key}: {missing} rounds before it were not captured, so that "
            "the client's state is not known",
        )
    try:
        gradient = simulated_gradient(opened.observation, result, unroll=opened.unroll)
    except OF_ONE_CASE as error:
        return _noting(spent, left=str(error))
    before = spent.evidence.notes[EARLIER]
    return _noting(
        replace(spent, known=replace(case.known, earlier=(*case.known.earlier, gradient))),
        reconstructed=[*before["reconstructed"], opened.observation.round],
        cosine=[*before["cosine"], result.trials[result.chosen].cosine],
    )


def _noting(case: Case, **more: Any) -> Case:
    empty: dict[str, Any] = {"reconstructed": [], "cosine": []}
    notes = empty | case.evidence.notes.get(EARLIER, {}) | more
    evidence = replace(case.evidence, notes=case.evidence.notes | {EARLIER: notes})
    return replace(case, evidence=evidence)
