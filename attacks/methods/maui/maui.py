"""Images from the update of a head: features off its gradient, then the backbone inverted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.methods.enlarging import EnlargingAttack
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.maui.features import read_features
from bract.attacks.methods.maui.head import Head, probe_inputs, trained_head
from bract.attacks.options import Count, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.errors import BractError
from bract.updates.update import Tensors

_PROBES = 32


MATCHED = 1e-3
"""Loss below which images are kept. Chosen on digits of 16 pixels that no benchmark scores: through
a fresh strided LeNet one, two and four of them lie below it, at 13 to 34 dB, where attacks that
guess had 9 to 33 dB."""


@ATTACKS.register("maui")
@dataclass(frozen=True, kw_only=True)
class Maui(InvertingAttack, EnlargingAttack):
    """Features from a head's gradient, inverted through the frozen backbone (MAUI, 2025).

    Transfer learning trains a head of linear layers on a backbone that everyone knows. Its update
    holds no gradient of a convolution, but the features of every image (`read_features`). Images
    are those whose features are the nearest: ``mean_b |phi(x_b) - h_b|^2 / s`` plus total
    variation, with s the mean squared distance of random images' features from their mean.
    Quasi-Newton descent on the logits of pixels goes from a quarter of the size or more to the
    whole, and is finished with less of the prior. MAUI (Dabholkar et al., arXiv 2509.11451) is the
    attack on this setting in two steps; how features are read and inverted is bract's own, for a
    server that leaves the model as it is.

    Attributes
    ----------
    starts
        Most starts from which features of several images are fitted, each with other labels where
        the update leaves some open.
    """

    name: ClassVar[str] = "maui"
    title: ClassVar[str] = "Maui"
    family: ClassVar[str] = "gradient matching over pixels"
    found_below: ClassVar[float | None] = MATCHED

    tv: Weight = 0.5
    starts: Count = 16

    def suits(self, case: Case) -> bool:
        """Say yes to the update of a head behind a frozen backbone, which it reads."""
        try:
            trained_head(case)
        except BractError:
            return False
        return True

    def require_model(self, case: Case) -> None:
        """Refuse models whose backbone is trained, or whose head is not linear."""
        super().require_model(case)
        trained_head(case)

    def prepare(self, case: Case) -> Case:
        """Refuse updates that hold the backbone; match what was trained alone."""
        case = super().prepare(case)
        head = trained_head(case)
        target = {name: case.evidence.target[name] for name in head.trained}
        return replace(case, evidence=replace(case.evidence, target=target))

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return the features of each image and its label."""
        seed = budget.seed % 2**31  # starts count on from it
        return read_features(case, trained_head(case), starts=self.starts, seed=seed)

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Find the images whose features were read."""
        heads = [trained_head(case) for case in problem.cases]
        problem.target_model.model.to(problem.device)
        apart, labels = _FeatureDistance.of(problem, heads, read), _labels(problem, read)
        found = self.descend(
            problem,
            run,
            labels,
            lambda images, _: apart(images),
            "feature matching",
            read[0].component,
        )
        found.losses = problem.residuals(found.images, labels, found.unknowns).to(torch.float64)
        return found


@dataclass(frozen=True)
class _FeatureDistance:
    """Mean squared distance of candidates' features from those that were read, by their spread."""

    problem: Problem
    heads: list[Head]
    read: Sequence[Entered]
    spreads: list[float]

    @classmethod
    def of(cls, problem: Problem, heads: list[Head], read: Sequence[Entered]) -> _FeatureDistance:
        """Measure the spread of the features of random images, trial by trial."""
        spreads = []
        for trial, (case, head) in enumerate(zip(problem.cases, heads, strict=True)):
            probes = probe_inputs(case, _PROBES, 0).to(problem.device, problem.dtype)
            with torch.no_grad():
                seen = head.features(_state(problem, trial), probes)
            spreads.append(float(seen.var(dim=0).sum().clamp_min(1e-30)))
        return cls(problem, heads, read, spreads)

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``(L,)`` for images ``(L, B, C, H, W)`` in [0, 1]."""
        inputs = self.problem.target_model.normalise(images)
        apart = []
        for trial, (head, wanted) in enumerate(zip(self.heads, self.read, strict=True)):
            assert wanted.values is not None
            known = wanted.values.to(images)
            seen = head.features(_state(self.problem, trial), inputs[trial])[: len(known)]
            each = (seen - known).square().sum(dim=1) / self.spreads[trial]
            apart.append(each.mean())
        return torch.stack(apart)


def _state(problem: Problem, trial: int) -> Tensors:
    """Return parameters and buffers of one trial, in the precision of the problem."""
    problem.target_model.follow(problem.parameters)
    return {name: value[trial] for name, value in (problem.parameters | problem.state).items()}


def _labels(problem: Problem, read: Sequence[Entered]) -> Tensor:
    """Return one-hot labels ``(L, B, classes)``; even ones where no features were read."""
    shape = (problem.trials, problem.image_shape[0], problem.classes)
    labels = torch.full(shape, 1.0 / problem.classes, device=problem.device, dtype=problem.dtype)
    for trial, found in enumerate(read):
        assert found.labels is not None
        rows = torch.nn.functional.one_hot(found.labels, problem.classes)
        labels[trial, : len(rows)] = rows.to(labels)
    return labels
