"""FedLeak: match part of the gradient, and descend to flat minima of the match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bract.attacks.base import Cost
from bract.attacks.methods.ig import IG
from bract.attacks.problem.objectives import Parts, partial_weights
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.optimizers import BatchedOptimizer, FlatDescent
from bract.attacks.solve.pixels import PixelSearch
from bract.errors import BractError, shown


@ATTACKS.register("fedleak")
@dataclass(frozen=True, kw_only=True)
class FedLeak(IG):
    """IG with partial gradient matching and gradient regularisation (FedLeak, 2025).

    Most coordinates of a trained model's gradient are small, and their match is dominated by errors
    of labels, statistics and local steps that are simulated (Fan et al., USENIX Security 2025,
    arXiv 2506.08435). A share of them is matched (`partial_weights`), and each step goes along the
    gradient of the loss plus its own norm (`FlatDescent`), at twice the cost of IG's. Which
    coordinates count and how strong the penalty is are bract's choice; all else is as in `IG`.

    Attributes
    ----------
    share, parts
        Share of the coordinates that is matched, and whether ``entries`` of every tensor or whole
        tensors (``layers``) are chosen, the largest first. Where the defense adds noise of a known
        likelihood, all are matched.
    flatness, radius
        Weight of the gradient at the radius, in [0, 1], 0 for none; and the radius, as the root
        mean square of the change of a pixel in the model's units.
    """

    name: ClassVar[str] = "fedleak"
    title: ClassVar[str] = "FedLeak"
    family: ClassVar[str] = "gradient matching over pixels"
    cost: ClassVar[Cost] = "tens of seconds"
    defaults: ClassVar[tuple[ModelDefault, ...]] = IG.defaults

    share: float = 0.3
    parts: Parts = "entries"
    flatness: float = 0.3
    radius: float = 0.01

    def __post_init__(self) -> None:
        for name, low, high in (("share", 0.0, 1.0), ("flatness", -1e-9, 1.0), ("radius", 0.0, 10)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                fits = False
            else:
                fits = low < value <= high
            if not fits:
                raise BractError(
                    f"attack {self.name}: {name} is {shown(value)}; expected a number above "
                    f"{max(low, 0.0):g}{' or 0' if low < 0 else ''}, at most {high:g}"
                )
        if self.parts not in ("entries", "layers"):
            raise BractError(
                f"attack {self.name}: parts is {shown(self.parts)}; expected entries or layers"
            )

    def matched(self, problem: Problem) -> Problem:
        """Return the problem with the coordinates left out that are not matched."""
        if problem.likelihood is not None:
            return problem
        return problem.weighted(partial_weights(problem.target, self.share, self.parts))

    def stepping(self, optimizer: BatchedOptimizer, search: PixelSearch) -> BatchedOptimizer:
        """Return the optimizer whose steps are regularised."""
        if not self.flatness:
            return optimizer
        return FlatDescent(
            optimizer,
            search.variables,
            share=self.flatness,
            radius=self.radius,
            project=search.box if self.boxed else None,
        )
