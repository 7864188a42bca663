"""Invert what entered a convolution, which its gradient tells exactly."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.methods.enlarging import EnlargingAttack
from bract.attacks.methods.patch_span.activations import (
    Activations,
    convolutions,
    entering,
    read_activations,
)
from bract.attacks.problem.case import Case
from bract.attacks.problem.exact import require_one_gradient
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.errors import BractError

INVERTED = 0.5
"""Loss below which images are taken for those whose activations were read: a squared sine, and the
error of statistics. Chosen on images that no benchmark scores: fresh ResNet-20s end at 0.006 to
0.24, with 13 to 32 dB."""

_LEAST_SHARE = 0.1
"""Least share of a budget in seconds that is left to the descent."""


@ATTACKS.register("patch-span")
@dataclass(frozen=True, kw_only=True)
class PatchSpan(EnlargingAttack):
    """Activations off the row space of a convolution's gradient, then the images from them.

    Through a convolution with as many units as places, of all images together, every patch of what
    entered lies in the row space of the weight's gradient, and maps all of whose patches do are
    those that entered and their mixtures
    (`bract.attacks.methods.patch_span.activations.solved`), whatever follows the layer, trained or
    fresh, in training mode or not. The first such layer is taken, of a ResNet-20 and one image the
    first of the last stage: 8,192 activations of 32 pixels. Quasi-Newton descent then lowers the
    squared sine between candidates' activations and that space, plus the error of the batch
    statistics before that layer (`OwnStatistics.error`) where the capture holds them, plus total
    variation, from a quarter of the size to the whole. Nothing behind that layer is simulated,
    where a small change of the image turns the gradient of a deep network behind ReLU around. That
    spans of gradients hold what entered is the idea of DAGER (Petrov et al. 2024) and SPEAR
    (Dimitrov et al. 2024); carrying it to patches that overlap is bract's own.
    """

    name: ClassVar[str] = "patch-span"
    title: ClassVar[str] = "Patch span"
    family: ClassVar[str] = "spans of a convolution's gradient"

    def require_model(self, case: Case) -> None:
        """Refuse models without a convolution that has as many units as places."""
        super().require_model(case)
        if not convolutions(case):
            raise BractError(
                f"{case.observation.key}: patch-span needs a convolution with at least as many "
                "units as places, and patches that overlap, and the model has none; use another "
                "attack"
            )

    def prepare(self, case: Case) -> Case:
        """Refuse updates of several steps."""
        case = super().prepare(case)
        require_one_gradient(case, self.name)
        return case

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Read each capture's activations, then descend stage by stage."""
        read: dict[str, Activations] = {}
        begun = time.perf_counter()
        try:
            for case in problem.cases:
                if case.observation.key not in read:
                    found = read_activations(case, seconds=run.seconds)
                    read[case.observation.key] = found.to(problem.device, problem.dtype)
        finally:
            problem.target_model.model.to(problem.device)
        if run.seconds is not None:
            left = run.seconds - (time.perf_counter() - begun)
            run = replace(run, seconds=max(left, _LEAST_SHARE * run.seconds))
        wanted = [read[case.observation.key] for case in problem.cases]
        known = OwnStatistics.of(problem)
        parts = ("span of patches", *(() if known is None else ("batch statistics",)))
        return self.descend(
            problem,
            run,
            hard_labels(problem),
            lambda images, _: _distance(problem, wanted, known, images),
            *parts,
        )


def _distance(
    problem: Problem, wanted: list[Activations], known: OwnStatistics | None, images: Tensor
) -> Tensor:
    """Return ``(L,)`` for images ``(L, B, C, H, W)`` in [0, 1]."""
    problem.target_model.follow(problem.parameters)
    inputs = problem.target_model.normalise(images)
    apart = []
    for trial, read in enumerate(wanted):
        state = {n: v[trial] for n, v in (problem.parameters | problem.state).items()}
        maps, seen = entering(problem.target_model, state, inputs[trial], read.layer.name)
        total = torch.stack([read.distance(each) for each in maps]).mean()
        if known is not None and seen:
            own = {n: (mean[None], variance[None]) for n, (mean, variance) in seen.items()}
            total = total + known.of_trial(trial).apart(own)[0]
        apart.append(total)
    return torch.stack(apart)
