"""The base of attacks that lower something else than the match, on images that grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bract.attacks.base import Attack, Cost
from bract.attacks.options import Count, Weight
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.enlarging import descend_enlarging


@dataclass(frozen=True, kw_only=True)
class EnlargingAttack(Attack):
    """Quasi-Newton descent on something that the update tells, plus total variation.

    From a quarter of the size, if that is 8 pixels or more, to the whole
    (`bract.attacks.solve.enlarging`).

    Attributes
    ----------
    tv
        Weight of total variation while coarse and at first.
    finish
        What multiplies it in the last stage.
    history
        Pairs that L-BFGS keeps.
    """

    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 600

    tv: Weight = 1e-2
    finish: Weight = 0.1
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
        """Descend on ``apart`` with the attack's settings, as `descend_enlarging` does.

        Parameters
        ----------
        labels
            ``(L, B, classes)``.
        apart
            Of images ``(L, B, C, H, W)`` in [0, 1] and labels, ``(L,)``.
        named
            What ``apart`` is, in a record of what ran.
        """
        return descend_enlarging(
            problem,
            run,
            labels,
            apart,
            named=named,
            tv=self.tv,
            finish=self.finish,
            history=self.history,
        )
