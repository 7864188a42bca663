"""The base of attacks that lower something else than the match, on images that grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bract.attacks.base import Attack, Cost
from bract.attacks.options import Count, Weight
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.descent import Outcome, Run, descend
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.matching import noise
from bract.attacks.solve.pixels import EnlargedPixels, Sides, parts_of, resized
from bract.attacks.solve.regularizers import TotalVariation
from bract.updates.update import Tensors

_SPREAD = 0.3
"""Standard deviation of the logits at the start."""

_COARSEST = 8
"""Least height and width in pixels of a coarse stage."""

_COARSE_SHARE = 0.15
"""Share of a run of each coarse stage."""


_FINISH = 0.1
"""Factor of total variation in the last stage."""


@dataclass(frozen=True, kw_only=True)
class EnlargingAttack(Attack):
    """Quasi-Newton descent on something that the update tells, plus total variation.

    From a quarter of the size, if that is 8 pixels or more, to the whole.

    Attributes
    ----------
    tv
        Weight of total variation while coarse and at first; the last stage has a tenth.
    history
        Pairs that L-BFGS keeps.
    """

    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 600

    tv: Weight = 1e-2
    history: Count = 50

    @property
    def matches(self) -> bool:
        """The update is not matched, so unknowns of the client are not searched."""
        return False

    def descend(
        self,
        problem: Problem,
        run: Run,
        labels: Tensor,
        apart: Callable[[Tensor, Tensor], Tensor],
        *named: str,
    ) -> Outcome:
        """Descend on logits of pixels, from a quarter of the size to the whole.

        Each stage begins with what the last one found; the last has less of the prior.

        Parameters
        ----------
        labels
            ``(L, B, classes)``.
        apart
            Of images ``(L, B, C, H, W)`` in [0, 1] and labels, what is lowered with total
            variation, ``(L,)``.
        named
            What ``apart`` is, in a record of what ran.
        """
        images, channels, height, width = problem.image_shape
        size = (height, width)
        stages = _stages(size, self.tv)
        logits = _SPREAD * noise(problem, images, channels, *stages[0][0])
        begun, found = 0.0, None
        for number, (sides, weight, share) in enumerate(stages):
            search = EnlargedPixels(resized(logits, sides), size, labels, logits=True)
            prior = TotalVariation(weight=weight)

            def loss(
                images: Tensor, labels: Tensor, unknowns: Tensors, prior: TotalVariation = prior
            ) -> Tensor:
                del unknowns
                return apart(images, labels) + prior(problem, images)

            iterations = None if run.iterations is None else max(1, round(run.iterations * share))
            part = run.part(f"stage-{number}", begun, min(1.0, begun + share), iterations)
            optimizer = BatchedLBFGS(search.variables, history=self.history)
            later = descend(problem, search, optimizer, loss, part, {})
            found = later if found is None else later.after(found)
            logits = search.values.detach()
            begun += share
        assert found is not None
        found.unknowns = {name: value.detach() for name, value in problem.unknowns().items()}
        parts = (*named, *search.components, "total variation", *BatchedLBFGS.components)
        return found.made_by("", *parts)


def _stages(size: Sides, tv: float) -> list[tuple[Sides, float, float]]:
    """Sides in pixels, weight of total variation and share of the run, stage by stage."""
    coarse = parts_of(size, _COARSEST)
    fine = (1.0 - _COARSE_SHARE * len(coarse)) / 2
    return [
        *((sides, tv, _COARSE_SHARE) for sides in coarse),
        (size, tv, fine),
        (size, tv * _FINISH, fine),
    ]
