"""The orders in which a client may have gone through its images, epoch after epoch."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

Order = tuple[tuple[int, ...], ...]
"""A permutation of the images for each epoch; the first one is the identity."""

_PATIENCE = 64


def batch_of(step: int, count: int, batch_size: int) -> range:
    """Positions in its epoch's order that step number ``step`` (from 0) takes.

    An epoch has ``ceil(count / batch_size)`` steps, the last of which may take fewer images.
    """
    start = step % steps_per_epoch(count, batch_size) * batch_size
    return range(start, min(start + batch_size, count))


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Steps until every one of ``count`` images was used once."""
    return math.ceil(count / batch_size)


def shuffle(count: int, batch_size: int, steps: int, choice: int) -> tuple[Order, int]:
    """Return an order of the images in every epoch, one of those that differ for an attacker.

    A client shuffles anew in every epoch, in an unknown order. Which image is called the first is
    open, so the first epoch is the identity; two orders that put images together into the same
    batches, but for their names, are one. Orders are drawn as the client draws its own, so likely
    ones come early; the second is that of a client that does not shuffle.

    Parameters
    ----------
    choice
        Number of the order, from 0; counted round and round where there are fewer.

    Returns
    -------
    tuple
        The order, and how often ``choice`` went round.
    """
    found = _distinct(count, batch_size, steps, choice + 1)
    return found[choice % len(found)], choice // len(found)


@lru_cache(maxsize=64)
def _distinct(count: int, batch_size: int, steps: int, wanted: int) -> tuple[Order, ...]:
    per_epoch = steps_per_epoch(count, batch_size)
    epochs = math.ceil(steps / per_epoch)
    identity = tuple(range(count))
    generator = torch.Generator().manual_seed(0)
    found: dict[tuple[tuple[int, ...], ...], Order] = {}
    drawn = failures = 0
    while len(found) < wanted and failures < _PATIENCE * (len(found) + 1):
        later = [identity] * (epochs - 1)
        if drawn != 1:
            later = [tuple(torch.randperm(count, generator=generator).tolist()) for _ in later]
        order = (identity, *later)
        drawn += 1
        key = _groups(order, batch_size, steps)
        failures = failures + 1 if key in found else 0
        found.setdefault(key, order)
    return tuple(found.values())


def _groups(order: Order, batch_size: int, steps: int) -> tuple[tuple[int, ...], ...]:
    """The steps that each image takes part in, whatever the images are called."""
    count = len(order[0])
    per_epoch = steps_per_epoch(count, batch_size)
    takes: list[list[int]] = [[] for _ in range(count)]
    for step in range(steps):
        for position in batch_of(step, count, batch_size):
            takes[order[step // per_epoch][position]].append(step)
    return tuple(sorted(tuple(own) for own in takes))
