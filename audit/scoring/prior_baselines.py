"""What a generator trained on public images gives without the upload."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks import TrainedPrior
from bract.audit.scoring.leak import PRIOR_NEAREST
from bract.audit.scoring.scoring import ScoredImages
from bract.seeds import derive_seed

PRIOR_SAMPLES = 256
"""Samples among which the nearest to an original is taken."""


def prior_baselines(
    public: TrainedPrior, scored: ScoredImages, count: int, seed: int
) -> dict[str, Tensor | None]:
    """Return samples of a trained generator, and those nearest to the originals.

    No attacker can choose the latter: what is no nearer than they are shows no leak.
    """
    kinds = scored.labels if public.facts.classes else [0]
    if max(kinds) >= max(1, public.facts.classes):
        return {}
    sampled = public.sample([kinds[i % len(kinds)] for i in range(count)], seed=seed)
    nearest = []
    for number, (original, label) in enumerate(zip(scored.originals, scored.labels, strict=True)):
        kind = label if public.facts.classes else 0
        drawn = public.sample([kind] * PRIOR_SAMPLES, seed=derive_seed(seed, "nearest", number))
        apart = (drawn - original).square().flatten(1).mean(dim=1)
        nearest.append(drawn[int(apart.argmin())])
    return {"prior_sample": sampled, PRIOR_NEAREST: torch.stack(nearest)}
