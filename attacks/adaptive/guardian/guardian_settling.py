"""Settle the readings of Guardian's delta and the image that they lead to, by second order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.adaptive.guardian.guardian_reading import Assemble, Group, Reading, read_all
from bract.attacks.problem.evidence import Evidence, Fitting
from bract.defenses import Guardian
from bract.updates.update import Tensors, unflatten

SETTLED = 1e-4
"""Distance of the readings from what the image simulates, relative to this, from which on they
count as one; float32 leaves 1e-6, wrong readings 2e-3 and more."""

_ROUNDS = 10
_STEPS = 3
_STARTS = 3
_FIT_STEPS = 120
_SURE = 25.0
"""Errors of its tensor by which a reading must be nearer than the next one to be decided: with 5
too many are wrong, and the image settles where they lead."""

_STUCK = 0.9
_FEW = 10


@dataclass(frozen=True)
class Settled:
    """Readings, one a group, and their relative distance from what the image simulates."""

    readings: list[Reading]
    off: float


def settle(
    hyper: Guardian,
    groups: list[Group],
    evidence: Evidence,
    labels: Sequence[int],
    fit: Fitting,
    *,
    flat: Callable[[Tensors], Tensor],
    assemble: Assemble,
    like: Tensors,
) -> Settled | None:
    """Fit an image by Levenberg-Marquardt and decide the readings again, coarse to fine.

    A reading is decided where it is nearer to what the image simulates than the next one by many
    times the error that the coordinates of its tensor with one reading still have; the others are
    left out of the match. As the image firms up that error falls, more readings are decided, and
    the scalars follow. Where this comes to rest with readings that the image does not explain, it
    begins again from another start.

    Parameters
    ----------
    evidence
        What the first image is fitted to.
    flat
        Puts a gradient by name into one vector ``(D,)`` in the update's scale.
    like
        Tensors of the names and shapes of the evidence's target.

    Returns
    -------
    Settled or None
        Of the start whose readings and image are nearest; None where nothing can be sharpened.
    """
    best: Settled | None = None
    for start in range(_STARTS):
        images = fit.images(evidence, labels, _FIT_STEPS, start=start)
        begun = fit.sharpen(evidence, labels, images, 0)
        if begun is None:
            return None
        expected, off = flat(begun[1]), math.inf
        for _ in range(_ROUNDS):
            readings = read_all(hyper, groups, expected)
            weights = unflatten(_decided(groups, readings, expected, like).float().cpu(), like)
            sure = assemble(readings)
            own = sure.weights or {}
            sure = replace(
                sure, alternatives=None, weights={n: own[n] * w for n, w in weights.items()}
            )
            sharpened = fit.sharpen(sure, labels, images, _STEPS)
            assert sharpened is not None
            images, expected = sharpened[0], flat(sharpened[1])
            readings, before = read_all(hyper, groups, expected), off
            off = _distance(groups, readings, expected)
            if best is None or off < best.off:
                best = Settled(readings, off)
            if off < SETTLED / 10 or off > _STUCK * before or fit.over:
                break
        assert best is not None
        if best.off < SETTLED or fit.over:
            break
    return best


def _decided(
    groups: list[Group], readings: list[Reading], expected: Tensor, like: Tensors
) -> Tensor:
    """Return 1 for each coordinate whose nearest reading is beyond doubt, else 0, ``(D,)``."""
    nearest = torch.zeros_like(expected)
    second = torch.full_like(expected, math.inf)
    for group, reading in zip(groups, readings, strict=True):
        apart = (reading.others - expected[group.part]).abs().nan_to_num(math.inf)
        nearest[group.part], second[group.part] = apart.sort(dim=0).values[:2]
    alone = second.isinf() & nearest.isfinite()
    whole = _size(nearest[alone]) if bool(alone.any()) else _size(expected)
    decided, position = torch.ones_like(expected), 0
    for value in like.values():
        part = slice(position, position + value.numel())
        position += value.numel()
        own = nearest[part][alone[part]]
        error = _size(own) if len(own) >= _FEW else whole
        decided[part] = (second[part] > _SURE * error).double()
    return decided


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _distance(groups: list[Group], readings: list[Reading], expected: Tensor) -> float:
    apart, whole = 0.0, 0.0
    for group, reading in zip(groups, readings, strict=True):
        finite = reading.error.isfinite()
        apart += float((reading.g - expected[group.part])[finite].square().sum())
        whole += float(expected[group.part][finite].square().sum())
    return math.sqrt(apart / max(whole, 1e-300))
