"""Several rounds of one client that each took an unknown part of its images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Attacker, Cost
from bract.attacks.methods.gauss_newton import solve_from
from bract.attacks.methods.multi_round.merging import merge, merged_alike
from bract.attacks.options import Count, Rate, Share, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.over_rounds import Assigned
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS, attack
from bract.attacks.result import Reconstruction, Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import minimise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.attacks.solve.regularizers import image_priors
from bract.attacks.task import AttackTask
from bract.errors import BractError
from bract.installed.plugins import elsewhere

_IMAGES, _LABELS = "start:images", "start:labels"
"""Among the buffers of a case: what `_Polish` begins with."""

_NEWTON_STEPS = 40
"""Most steps of second order of one joint fit."""

_AT_ONCE = 2**26
"""Coordinates of all models that are simulated side by side while images are exchanged."""

_BETTER = 0.99
"""A round takes another image where its residual falls below this share."""


@ATTACKS.register("multi-round")
@dataclass(frozen=True, kw_only=True)
class MultiRound(Attacker):
    """Attack rounds one by one, find images that several of them hold, and fit those together.

    A client that trains on one batch a round draws another part of its images each time, and which
    part is not declared. So (1) every round is attacked by itself; (2) images of different rounds,
    of one label and with correlated pixels, are taken for the same one (`merge`), best matched
    rounds first; (3) all of them are fitted to all rounds, each round with its own images
    (`join_rounds`); (4) each round may exchange one of its images for another one of the pool where
    that matches it better (`reassign`), images that have become alike are merged, and (3) is
    repeated, at most ``passes`` times. The truth enters nowhere.

    A single upload is attacked as ``inner`` does. `auto` lets it compete wherever rounds are
    joined, and takes it where no images that are the same in all of them match.

    Attributes
    ----------
    inner
        Registered name of the attack on one round.
    same
        Least correlation of pixels of two images that are taken for the same one, in [0, 1].
    passes
        Most joint fits.
    tv
        Weight of total variation in the joint fit, on models with kinks.
    lr
        Step of the joint fit in normalised units.
    """

    name: ClassVar[str] = "multi-round"
    title: ClassVar[str] = "Multi-round"
    family: ClassVar[str] = "gradient matching over pixels"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 4800
    looser: ClassVar[bool] = True

    inner: str = "ig"
    same: Share = 0.6
    passes: Count = 2
    tv: Weight = 1e-3
    lr: Rate = 0.02

    def __post_init__(self) -> None:
        if self.inner in elsewhere("bract.attacks") and self.inner not in ATTACKS:
            raise ATTACKS.missing(self.inner)
        if self.inner == self.name or self.inner not in ATTACKS:
            raise BractError(
                f"multi-round cannot use {self.inner!r}; give the name of an attack",
                code="config-value",
            )

    def suits(self, case: Case) -> bool:
        """Say yes to several rounds: no upload shows whether each took a part of the images."""
        return len(case.rounds) > 1

    def prior(self) -> Attacker | None:
        """Return that of the attack on one round."""
        return attack(self.inner).prior()

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        """Attack each case; its rounds run as one batch."""
        return [self._attack(case, task) for case in cases]

    def _attack(self, case: Case, task: AttackTask) -> Reconstruction | Refusal:
        rounds = list(case.rounds)
        if rounds and task.budget.seconds is not None:
            # Every part gets a share: the rounds, which are uploads of their own, and each fit.
            part = task.budget.seconds / (len(rounds) + self.passes)
            task = replace(task, budget=replace(task.budget, seconds=part))
        results = attack(self.inner).run(rounds or [case], task)
        found = [r for r in results if isinstance(r, Reconstruction)]
        if not rounds or len(found) < len(results):
            # The reason of one round that cannot be attacked is given for all.
            chosen = next((r for r in results if isinstance(r, Refusal)), results[-1])
            return replace(chosen, attack=self.name)
        images, labels, assigned = merge(found, self.same)
        spent = sum(r.seconds for r in found)
        polish = _Polish(tv=self.tv, lr=self.lr)
        # A joint fit has one start, from which every restart would go the same way.
        once = replace(task, budget=replace(task.budget, restarts=1, chosen_restarts=None))
        result: Reconstruction | Refusal = results[-1]
        before = assigned
        for number in range(self.passes):
            joint = _starting(join_rounds(rounds, assigned=assigned), images, labels)
            (result,) = polish.run([joint], once)
            if isinstance(result, Refusal):
                return replace(result, attack=self.name)
            spent += result.seconds
            before = assigned
            if number + 1 == self.passes:
                break
            rows = result.label_probabilities
            assigned = reassign(rounds, assigned, result.images, rows)
            images, labels, assigned = merged_alike(
                result.images, rows.argmax(dim=1), assigned, self.same
            )
            if assigned == before:
                break
        assert isinstance(result, Reconstruction)
        about: dict[str, Any] = {"inner": self.inner, "assigned": [list(r) for r in before]}
        trials = tuple(
            replace(
                trial,
                attack=self.name,
                method=self.name,
                components=tuple(dict.fromkeys((*found[-1].components, *trial.components))),
                settings=trial.settings | self.settings() | about,
            )
            for trial in result.trials
        )
        return replace(
            result,
            attack=self.name,
            trials=trials,
            seconds=case.seconds + spent,
            settings=result.settings | self.settings() | about,
        )


@dataclass(frozen=True, kw_only=True)
class _Polish(Attack):
    """Fit given images with given labels: by second order where the model is smooth."""

    name: ClassVar[str] = MultiRound.name
    iterations: ClassVar[int] = 400

    tv: float
    lr: float
    max_unknowns: int = 4096

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Go on from the buffers' images."""
        start, labels = problem.buffers[_IMAGES], problem.buffers[_LABELS]
        smooth = problem.target_model.traits.smooth and problem.likelihood is None
        if smooth and start[0].numel() <= self.max_unknowns:
            most = min(run.iterations or _NEWTON_STEPS, _NEWTON_STEPS)
            return solve_from(problem, start, labels, run.part("solve", 0.0, 1.0, most))
        search = PixelSearch(problem, problem.target_model.normalise(start), labels)
        unknowns = problem.unknowns()
        return minimise(
            problem,
            search,
            FirstOrder(
                search.variables | unknowns,
                FirstOrderSettings(kind="adam", lr=self.lr, schedule="cosine"),
                project=search.box,
            ),
            run,
            objective=RelativeError(),
            priors=image_priors(tv=self.tv, power=1, bn=0.0),
            unknowns=unknowns,
        )


def reassign(
    rounds: Sequence[Case], assigned: Assigned, images: Tensor, labels: Tensor
) -> Assigned:
    """Let each round exchange images for others of the pool, one by one, where it matches better.

    Parameters
    ----------
    images, labels
        ``(M, C, H, W)`` and rows of probabilities ``(M, classes)``.
    """
    return tuple(
        _reassigned(case, row, images, labels) for case, row in zip(rounds, assigned, strict=True)
    )


def _reassigned(
    case: Case, row: tuple[int, ...], images: Tensor, labels: Tensor
) -> tuple[int, ...]:
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    if problem.unknowns():
        return row

    def errors(rows: Sequence[Sequence[int]]) -> Tensor:
        size = sum(value.numel() for value in problem.parameters.values())
        found = []
        for part in torch.tensor([list(r) for r in rows]).split(max(1, _AT_ONCE // size)):
            at = problem.select([0] * len(part))
            found.append(at.residuals(images[part], labels[part], {}))
        return torch.cat(found)

    lowest = float(errors([row])[0])
    for _ in row:
        others = [place for place in range(len(images)) if place not in row]
        tried = [
            (*row[:slot], place, *row[slot + 1 :]) for slot in range(len(row)) for place in others
        ]
        if not tried:
            break
        found = errors(tried)
        best = int(found.argmin())
        if not float(found[best]) < _BETTER * lowest:
            break
        row, lowest = tried[best], float(found[best])
    return row


def _starting(case: Case, images: Tensor, labels: Tensor) -> Case:
    classes = case.observation.declaration.classes or int(labels.max()) + 1
    rows = torch.nn.functional.one_hot(labels, classes).to(images.dtype)
    held = case.evidence.buffers | {_IMAGES: images, _LABELS: rows}
    return replace(case, evidence=replace(case.evidence, buffers=held))
