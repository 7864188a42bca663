"""How well gradients of different images can be told apart under an attacker's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.attacks.evidence import Evidence
from bract.attacks.simulation import ForwardModel
from bract.attacks.victim import Victim
from bract.observation import Observation
from bract.update import Tensors

_PAIRS = 8
_GRID = 4


def visible_share(
    victim: Victim,
    observation: Observation,
    forward: ForwardModel,
    evidence: Evidence,
    images: int,
) -> float:
    """How much of the distance between gradients of two images the weights leave, in (0, 1].

    Losses that are not free of scale weigh the gradient against a prior, with factors that were
    chosen undefended. Divided by this share, weights keep that balance. It is the mean over
    pairs of smooth random images with equal labels, since only images are to be told apart.
    """
    protocol = observation.protocol
    shape, classes = protocol.image_shape, protocol.classes
    if shape is None or classes is None or evidence.weights is None:
        raise AssertionError("open_case refuses protocols without shape and classes")
    generator = torch.Generator().manual_seed(0)
    pixels = smooth_images(2 * _PAIRS * images, shape, generator)
    labels = torch.randint(classes, (_PAIRS, images), generator=generator)
    if evidence.labels is not None:
        labels = evidence.labels.cpu().expand(_PAIRS, -1)
    rows = torch.nn.functional.one_hot(labels, classes).float().repeat(2, 1, 1)
    lanes = 2 * _PAIRS
    victim.model.cpu()

    def spread(tensors: Tensors, names: Sequence[str]) -> Tensors:
        return {n: tensors[n].cpu()[None].expand(lanes, *tensors[n].shape) for n in names}

    found = forward(
        victim,
        spread(observation.parameters, victim.parameter_names),
        spread(observation.buffers | evidence.buffers, (*victim.buffer_names, *evidence.buffers)),
        victim.normalise(pixels.view(lanes, images, *shape)),
        rows,
        forward.unknowns(
            victim, lanes, [torch.Generator().manual_seed(i % _PAIRS) for i in range(lanes)]
        ),
    )
    seen = total = 0.0
    for name in scaled_names(victim, evidence):
        apart = (found[name][:_PAIRS] - found[name][_PAIRS:]).detach().double().square()
        weight = evidence.weights.get(name)
        total += float(apart.sum())
        seen += float((apart if weight is None else apart * weight.cpu()).sum())
    return seen / total if seen > 0.0 and total > 0.0 else 1.0


def scaled_names(victim: Victim, evidence: Evidence) -> list[str]:
    """Names of the parameters to match: what else is matched brings its own proportion along."""
    return [name for name in evidence.target if name in victim.parameter_names]


def smooth_images(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random images ``(count, C, H, W)`` in [0, 1], a few grey values across each side."""
    channels, height, width = shape
    coarse = torch.rand(count, channels, _GRID, _GRID, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
