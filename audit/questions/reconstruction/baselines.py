"""Reconstructions without the gradient: what an attack's score has to be held against."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bract.attacks import Budget, Case, Reconstruction, attack
from bract.attacks.methods.baselines import prior_only
from bract.attacks.problem.public_prior import PublicPrior
from bract.errors import BractError
from bract.inputs import References
from bract.installed.plugins import blaming
from bract.scores.base import ScoredImages
from bract.scores.leaks import PRIOR_NEAREST
from bract.seeds import derive_seed

_log = logging.getLogger(__name__)

PRIOR_ITERATIONS = 200
"""Steps of the prior-only baseline: with no gradient to match, it settles early."""

PRIOR_SAMPLES = 256
"""Samples among which the nearest to an original is taken."""


@dataclass
class Baselines:
    """Makes the baselines of an audit; what an attack makes without a gradient is made once.

    Parameters
    ----------
    seed, device, max_images
        As in the audit's request.
    """

    seed: int
    device: str
    max_images: int
    _priors: dict[tuple[str, int], Tensor | None] = field(default_factory=dict, repr=False)

    def made(
        self,
        case: Case,
        result: Reconstruction,
        scored: ScoredImages,
        references: References | None,
    ) -> dict[str, Tensor]:
        """Return as many examples as were reconstructed, by the baseline's name."""
        count = len(result.images)
        seed = derive_seed(self.seed, "baseline", case.observation.key)
        found: dict[str, Tensor | None] = {}
        if references is not None:
            labels = torch.tensor(scored.labels)
            found |= references.baselines(labels, count, seed=seed)
        found["prior_only"] = self._prior_only(case, result.pick.attack, count)
        if case.public is not None:
            found |= generator_baselines(case.public, scored, count, seed)
        return {name: images for name, images in found.items() if images is not None}

    def _prior_only(self, case: Case, name: str, count: int) -> Tensor | None:
        """Return what the attack makes without a gradient to match; the same for every client."""
        if (name, count) not in self._priors:
            try:
                # Starts depend on round and client: not on whichever update was scored first.
                unnamed = replace(case.observation, round=1, client="anybody")
                result = prior_only(attack(name))(
                    unnamed,
                    budget=Budget(iterations=PRIOR_ITERATIONS, max_images=self.max_images),
                    seed=derive_seed(self.seed, "prior", name),
                    device=self.device,
                    public=case.public,
                )
                self._priors[name, count] = result.images[:count]
            except BractError as error:
                # As text: a kept error would keep the observation, by its traceback.
                _log.info("%s: no prior-only baseline: %s", name, str(error))
                self._priors[name, count] = None
        return self._priors[name, count]


def generator_baselines(
    public: PublicPrior, scored: ScoredImages, count: int, seed: int
) -> dict[str, Tensor]:
    """Return samples of a trained generator, and those nearest to the originals.

    No attacker can choose the latter: what is no nearer than they are shows no leak.
    """
    kinds = scored.labels if public.classes else [0]
    if max(kinds) >= max(1, public.classes):
        return {}
    with blaming(type(public)):
        sampled = public.sample([kinds[i % len(kinds)] for i in range(count)], seed=seed)
    nearest = []
    for number, (original, label) in enumerate(zip(scored.originals, scored.labels, strict=True)):
        kind = label if public.classes else 0
        with blaming(type(public)):
            drawn = public.sample([kind] * PRIOR_SAMPLES, seed=derive_seed(seed, "nearest", number))
        apart = (drawn - original).square().flatten(1).mean(dim=1)
        nearest.append(drawn[int(apart.argmin())])
    return {"prior_sample": sampled, PRIOR_NEAREST: torch.stack(nearest)}
