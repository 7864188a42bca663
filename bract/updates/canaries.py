"""Directions of canary updates, which client and auditor derive alike."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.seeds import derive_seed


def canary_directions(size: int, count: int, *, seed: int, client: str, number: int) -> Tensor:
    """Return orthonormal directions by parts: float64 ``(size,)`` and whose part each number is.

    Every coordinate belongs to one direction, in which it is plus or minus the same number. The
    directions are public; which sign a client gave them is not.

    Parameters
    ----------
    size, count
        Of the update, and of directions, at most ``size``.
    seed
        The federation's.
    client, number
        The client's name and the round.

    Returns
    -------
    Tensor
        ``(2, size)``: values, and the direction's position from 0.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "canary", client, number))
    owner = torch.arange(size)[torch.randperm(size, generator=generator)] % count
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
    lengths = torch.bincount(owner, minlength=count).to(torch.float64).sqrt()
    return torch.stack([signs.to(torch.float64) / lengths[owner], owner.to(torch.float64)])


def canary_update(directions: Tensor, signs: Tensor, norm: float) -> Tensor:
    """Return the vector of this 2-norm with the sign of each direction, ``(size,)``.

    Parameters
    ----------
    signs
        1 or -1, ``(count,)``.
    """
    values, owner = directions[0], directions[1].long()
    length: float = norm / len(signs) ** 0.5
    return torch.mul(values * signs.to(torch.float64)[owner], length)


def canary_projections(directions: Tensor, vector: Tensor, count: int) -> Tensor:
    """Return the inner product of a vector and each direction, float64 ``(count,)``."""
    values, owner = directions[0], directions[1].long()
    products = values * vector.to(torch.float64)
    return torch.zeros(count, dtype=torch.float64).index_add_(0, owner, products)
