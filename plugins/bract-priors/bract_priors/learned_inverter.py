"""Learning to invert: a network that is trained to predict images from updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bract.attacks import Outcome, Problem, Run, hard_labels
from bract.attacks.base import Cost
from bract.attacks.options import Count, Rate, Share
from bract.attacks.solve.descent import Recipe
from bract_priors.ggl import search_latent, without_latent
from bract_priors.gias import GIAS, search_latent_and_weights
from bract_priors.inverter import InverterSettings, predicted_latents
from bract_priors.latent import made_images, usable_prior


@dataclass(frozen=True, kw_only=True)
class LearnedInverter(GIAS):
    """Learning to invert (Wu et al., UAI 2023): predict the image of an update by a network.

    For each global model and declaration the client is simulated on images of the trained
    generator, its training and defense included; a perceptron learns to predict the latent from
    the update that it would have sent, hashed to a short vector. A prediction needs no gradient
    through the defense. Uploads of the same model and declaration share one network.

    Differences to the published attack: the network predicts a latent, not pixels, so that few
    pairs do; images are the generator's, as many as there are steps; labels are read from the last
    layer and given to it. The prediction may then be the start of a search.

    Attributes
    ----------
    finish
        ``none`` returns the prediction; ``latent`` searches the latent from it, as `GGL` does;
        ``weights`` then the generator's weights, as `GIAS` does.
    inverter_share
        Share of the budget that training gets where a search follows; one of its iterations is a
        step on ``pairs`` new pairs.
    features, width, pairs, inverter_lr
        See `bract_priors.inverter.InverterSettings`.
    """

    name: ClassVar[str] = "learned-inverter"
    title: ClassVar[str] = "Learned inverter"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 1000

    defense: Literal["simulate", "undo", "auto"] = "simulate"
    finish: Literal["none", "latent", "weights"] = "weights"
    inverter_share: Share = 0.4
    features: Count = 2048
    width: Count = 512
    pairs: Count = 64
    inverter_lr: Rate = 1e-3

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Train, predict, and search from the prediction."""
        if not self.matches:
            return without_latent(search_latent(self, problem, run))
        share = 1.0 if self.finish == "none" else self.inverter_share
        total = run.iterations
        first = None if total is None else max(1, round(share * total))
        labels = hard_labels(problem)
        prior = usable_prior(problem.cases[0])
        settings = InverterSettings(
            features=self.features, width=self.width, pairs=self.pairs, lr=self.inverter_lr
        )
        training = run.part("training", 0.0, share, first)
        latents, steps = predicted_latents(problem, labels, prior, settings, training)
        predicted = self._predicted(problem, labels, latents, steps)
        if self.finish == "none":
            return predicted
        left = None if total is None else max(1, total - (first or 0))
        rest = run.part("search", share, 1.0, left)
        if self.finish == "latent":
            found = without_latent(search_latent(self, problem, rest, latents))
        else:
            found = search_latent_and_weights(self, problem, rest, latents)
        return found.after(predicted).made_by("", *self._components)

    _components: ClassVar[tuple[str, ...]] = ("learned inverter", "trained generator")

    def _predicted(self, problem: Problem, labels: Tensor, latents: Tensor, steps: int) -> Outcome:
        """Return what the generator makes of predictions, with its loss."""
        prior = usable_prior(problem.cases[0])
        decoder = prior.decoder().to(problem.device, problem.dtype)
        with torch.no_grad():
            images = made_images(decoder, latents, labels if prior.facts.classes else None)
            simulated = problem.simulate(images, labels, {})
            losses = problem.distance(problem.likelihood or self.objective, simulated)
        losses = losses.to(torch.float64)
        return Outcome(
            images=images,
            labels=labels,
            losses=losses,
            curves=[[(steps, loss)] for loss in losses.tolist()],
            iterations=steps,
            recipes=[Recipe("", (*self._components, "labels analytic"))] * problem.trials,
        )
