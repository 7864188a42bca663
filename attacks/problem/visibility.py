"""How well an attacker's weights distinguish gradients of different images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.attacks.problem.client_model import ForwardModel
from bract.attacks.problem.evidence import Evidence
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation
from bract.models.losses import drawn_labels, label_rows
from bract.updates.update import Tensors

_PAIRS = 8
_GRID = 4


def visible_share(
    target_model: TargetModel,
    observation: Observation,
    forward: ForwardModel,
    evidence: Evidence,
    images: int,
) -> float:
    """Return the share of the distance between two images' gradients that weights leave, in (0, 1].

    Losses that are not free of scale weigh the gradient against a prior, with factors that were
    chosen undefended. Divided by this share, weights keep that balance. It is the mean over pairs
    of smooth random images with equal labels, since only images are to be distinguished.
    """
    shape, classes = target_model.image_shape, target_model.classes
    if evidence.weights is None:
        raise AssertionError("the caller has weights")
    generator = torch.Generator().manual_seed(0)
    pixels = smooth_images(2 * _PAIRS * images, shape, generator)
    loss = target_model.loss
    labels = drawn_labels(
        loss, (_PAIRS, images), outputs=classes, tokens=shape[0], generator=generator
    )
    if evidence.labels is not None:
        labels = evidence.labels.cpu().expand(_PAIRS, -1)
    rows = label_rows(labels, classes, loss).float().repeat(2, 1, 1)
    trials = 2 * _PAIRS
    target_model.model.cpu()

    def spread(tensors: Tensors, names: Sequence[str]) -> Tensors:
        return {n: tensors[n].cpu()[None].expand(trials, *tensors[n].shape) for n in names}

    found = forward(
        target_model,
        spread(observation.parameters, target_model.parameter_names),
        spread(
            observation.buffers | evidence.buffers, (*target_model.buffer_names, *evidence.buffers)
        ),
        target_model.normalise(pixels.view(trials, images, *shape)),
        rows,
        forward.unknowns(
            target_model, trials, [torch.Generator().manual_seed(i % _PAIRS) for i in range(trials)]
        ),
    )
    seen = total = 0.0
    for name in scaled_names(target_model, evidence):
        apart = (found[name][:_PAIRS] - found[name][_PAIRS:]).detach().double().square()
        weight = evidence.weights.get(name)
        total += float(apart.sum())
        seen += float((apart if weight is None else apart * weight.cpu()).sum())
    return seen / total if seen > 0.0 and total > 0.0 else 1.0


def scaled_names(target_model: TargetModel, evidence: Evidence) -> list[str]:
    """Names of the parameters to match: what else is matched brings its own proportion along."""
    return [name for name in evidence.target if name in target_model.parameter_names]


def smooth_images(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random images ``(count, C, H, W)`` in [0, 1], a few grey values across each side."""
    channels, height, width = shape
    coarse = torch.rand(count, channels, _GRID, _GRID, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
