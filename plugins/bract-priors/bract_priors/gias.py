"""GIAS: search the latent of a trained generator, then its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from bract.attacks import (
    FirstOrder,
    FirstOrderSettings,
    Outcome,
    Problem,
    Run,
    hard_labels,
    minimise,
)
from bract.attacks.options import Rate, Share, Weight
from bract.attacks.solve.regularizers import image_priors
from bract_priors.ggl import GGL, search_latent, without_latent
from bract_priors.latent import LATENT, LatentSearch, Relative


@dataclass(frozen=True, kw_only=True)
class GIAS(GGL):
    """Gradient inversion in alternative spaces (Jeon et al., NeurIPS 2021).

    The latent of a trained generator is searched first, then, from its best value, the generator's
    weights, one set an upload: they can make what no latent does. Both match by the cosine. What is
    fitted at the end is no longer an image of the prior; total variation, as the published attack
    has it, may be added to the distance then. Where the evidence has a likelihood (noise) the
    weights stay: the plausibility of others is unknown, and they fit noise.

    Attributes
    ----------
    latent_share
        Share of the budget that the latent gets.
    weights_lr
        Of Adam in the second stage.
    tv
        Weight of total variation in the second stage, relative to a distance that is 1 at its
        start.
    """

    name: ClassVar[str] = "gias"
    title: ClassVar[str] = "GIAS"
    iterations: ClassVar[int] = 2000

    search: Literal["cma", "adam"] = "adam"
    defense: Literal["simulate", "undo", "auto"] = "auto"
    latent_share: Share = 0.4
    weights_lr: Rate = 1e-3
    tv: Weight = 0.0

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search the latent, then the weights."""
        return search_latent_and_weights(self, problem, run)


def search_latent_and_weights(
    attack: GIAS, problem: Problem, run: Run, proposed: Tensor | None = None
) -> Outcome:
    """Search both by the settings of ``attack``; ``proposed`` is as `search_latent` has it."""
    share = 1.0 if problem.likelihood is not None else attack.latent_share
    total = run.iterations
    first = None if total is None else max(1, round(share * total))
    rough = search_latent(attack, problem, run.part("latent", 0.0, share, first), proposed)
    if not attack.matches or problem.likelihood is not None:
        return without_latent(rough)
    begun = replace(problem, starts=without_latent(rough).unknowns or None)
    relative = Relative(attack.objective, rough.losses.to(problem.dtype).clamp_min(1e-20))
    space = LatentSearch(problem, hard_labels(problem), rough.unknowns[LATENT], weights=True)
    unknowns = begun.unknowns()
    fine = minimise(
        problem,
        space,
        FirstOrder(
            space.variables | unknowns,
            FirstOrderSettings(kind="adam", lr=attack.weights_lr, schedule="cosine"),
        ),
        run.part("weights", share, 1.0, None if total is None else max(1, total - (first or 0))),
        objective=relative,
        priors=image_priors(tv=attack.tv, power=1, bn=0.0),
        unknowns=unknowns,
    )
    return relative.undone(fine).after(rough)
