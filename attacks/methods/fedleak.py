"""FedLeak: match part of the gradient, and descend to flat minima of the match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from bract.attacks.base import Cost
from bract.attacks.methods.grnn.generator import GeneratorSearch
from bract.attacks.methods.ig import IG
from bract.attacks.options import Share
from bract.attacks.problem.objectives import Parts, partial_weights
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.defaults import ModelDefault
from bract.attacks.solve.descent import Search
from bract.attacks.solve.matching import hard_labels
from bract.attacks.solve.optimizers import BatchedOptimizer, FlatDescent
from bract.attacks.solve.pixels import PixelSearch

LATENT, WIDTH = 128, 32
"""Of the generator, as GRNN has them."""


def _nonzero(value: float) -> float:
    if not value:
        raise ValueError("0")
    return value


@ATTACKS.register("fedleak")
@dataclass(frozen=True, kw_only=True)
class FedLeak(IG):
    """IG with partial gradient matching and gradient regularisation (FedLeak, 2025).

    Most coordinates of a trained model's gradient are small, and their match is dominated by errors
    of labels, statistics and local steps that are simulated (Fan et al., USENIX Security 2025,
    arXiv 2506.08435). A share of them is matched (`partial_weights`), and each step goes along the
    gradient of the loss plus its own norm (`FlatDescent`), at twice the cost of IG's. Which
    coordinates count and how strong the penalty is are bract's choice; all else is as in `IG`.

    The authors' code (Zenodo 15532455) searches the weights of an untrained generator, matches each
    tensor by its own cosine where the *simulated* gradient is largest (`EachTensor`), and takes its
    second gradient downhill, where the step leads: ``FedLeak(search="generator",
    objective=EachTensor(0.5), share=1.0, flatness=0.3, radius=-0.01, lr=0.01, schedule="cosine",
    tv=1e-5)`` is as near as parts of bract come. Its generator is GRNN's here, its median filter
    of the result is left out.

    Attributes
    ----------
    share, parts
        Share of the coordinates that is matched, and whether ``entries`` of every tensor or whole
        tensors (``layers``) are chosen, the largest first. Where the defense adds noise of a known
        likelihood, all are matched.
    flatness, radius
        Weight of the gradient at the radius, in [0, 1], 0 for none; and the radius, as the root
        mean square of the change of a variable (a pixel in the model's units), uphill; below 0
        downhill.
    search
        ``pixels``, or the weights of a ``generator`` a trial.
    """

    name: ClassVar[str] = "fedleak"
    inputs: ClassVar[tuple[str, ...]] = ("image",)
    title: ClassVar[str] = "FedLeak"
    family: ClassVar[str] = "gradient matching over pixels"
    cost: ClassVar[Cost] = "tens of seconds"
    defaults: ClassVar[tuple[ModelDefault, ...]] = IG.defaults

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    parts: Parts = "entries"
    flatness: Share = 0.3
    radius: Annotated[
        float,
        Field(ge=-10.0, le=10.0, description="a number from -10 to 10 that is not 0"),
        AfterValidator(_nonzero),
    ] = 0.01
    search: Literal["pixels", "generator"] = "pixels"

    def searched(self, problem: Problem) -> Search:
        """Return the images that are searched."""
        if self.search == "pixels":
            return super().searched(problem)
        known = hard_labels(problem) if self.labels == "infer" else None
        return GeneratorSearch(problem, latent=LATENT, width=WIDTH, labels=known)

    def matched(self, problem: Problem) -> Problem:
        """Return the problem with the coordinates left out that are not matched."""
        if problem.likelihood is not None:
            return problem
        return problem.weighted(partial_weights(problem.target, self.share, self.parts))

    def stepping(self, optimizer: BatchedOptimizer, search: Search) -> BatchedOptimizer:
        """Return the optimizer whose steps are regularised."""
        if not self.flatness:
            return optimizer
        return FlatDescent(
            optimizer,
            search.variables,
            share=self.flatness,
            radius=self.radius,
            project=search.box if self.boxed and isinstance(search, PixelSearch) else None,
        )
