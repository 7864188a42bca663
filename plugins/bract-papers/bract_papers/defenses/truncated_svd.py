"""Truncated SVD: each layer's update, its smallest singular values left out (Luo et al. 2026)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses import Defense, ProtectContext, Stage
from bract.updates.update import Tensors


class TruncatedSVD(Defense):
    """Send the approximation of lowest rank that keeps a share of each layer's energy.

    The basis of SVDefense (Luo, Yau and Song, NDSS 2026): of a layer's ``G = sum_i s_i u_i v_i^T``
    with ``s_1 >= s_2 >= ...`` the first k terms are sent, k the least number for which
    ``s_1^2 + ... + s_k^2`` is at least ``energy`` of the whole sum.

    Deviations: SVDefense sets each client's threshold by the entropy of its singular values, weighs
    channels before it decomposes them, and has the server weigh layers. Here the threshold is one
    number for all, and nothing is weighted: what is measured of it holds for the truncation alone.

    A convolution is the matrix of its output channels. A vector is one more column of a matrix with
    as many rows: of the one that its name gives, or else of the nearest before it, or after it (a
    list has no names, and others may be the sender's). Where there is none it has rank 1 and is
    sent as it is, and so is the gradient of one image in a linear layer.

    Parameters
    ----------
    energy
        Least share of the squared singular values that is kept of each layer.
    """

    name: ClassVar[str] = "truncated-svd"
    title: ClassVar[str] = "truncated SVD, {energy} of the energy"
    summary: ClassVar[str] = "each layer's largest singular values only"
    stage: ClassVar[Stage] = Stage.TRANSFORM

    energy: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9

    def at_least(self, other: Defense) -> bool:
        """Compare the shares of the energy that are kept."""
        return isinstance(other, TruncatedSVD) and self.energy <= other.energy

    @torch.no_grad()
    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the truncated update; `report` gives the mean share of the rank that is kept."""
        del state, context
        kept, sent = [], {}
        for name, matrix in layer_matrices(update).items():
            left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
            rank = int(rank_of(values, self.energy))
            sent[name] = (left[:, :rank] * values[:rank]) @ right[:rank]
            kept.append(rank / max(1, len(values)))
        self.note(rank_kept=sum(kept) / len(kept))
        return from_layer_matrices(sent, update)


def rank_of(values: Tensor, energy: float) -> Tensor:
    """Return how many of the sorted singular values ``(..., r)`` hold the energy, at least 1."""
    held = values.square().cumsum(-1)
    return (held < energy * held[..., -1:]).sum(-1) + 1


def layer_matrices(tensors: Mapping[str, Tensor], trials: int = 0) -> Tensors:
    """Return each layer as a matrix ``(out, n)``, its bias the last column; vectors as ``(d, 1)``.

    Parameters
    ----------
    trials
        Leading dimensions that are not the layer's: 1 for tensors ``(L, ...)``.
    """
    made = {}
    for name, vectors in _layers(tensors, trials).items():
        value = tensors[name]
        if value.dim() > trials + 1:
            matrix = value.flatten(trials + 1)
        else:
            matrix = value.reshape(*value.shape[:trials], -1, 1)
        made[name] = torch.cat([matrix, *(tensors[one].unsqueeze(-1) for one in vectors)], dim=-1)
    return made


def from_layer_matrices(
    matrices: Mapping[str, Tensor], like: Mapping[str, Tensor], trials: int = 0
) -> Tensors:
    """Return what `layer_matrices` made matrices of, in the order and dtypes of ``like``."""
    parts = {}
    for name, vectors in _layers(like, trials).items():
        width = math.prod(like[name].shape[trials + 1 :])
        parts[name] = matrices[name][..., :width]
        for place, one in enumerate(vectors):
            parts[one] = matrices[name][..., width + place]
    return {n: parts[n].reshape(value.shape).to(value.dtype) for n, value in like.items()}


def _layers(tensors: Mapping[str, Tensor], trials: int) -> dict[str, list[str]]:
    """Return the tensors that are matrices or stand alone, each with the vectors that join it."""
    owners: dict[str, str] = {}
    names = list(tensors)
    for place, name in enumerate(names):
        named = f"{name.removesuffix('bias')}weight" if name.endswith("bias") else ""
        for weight in (named, *reversed(names[:place]), *names[place + 1 :]):
            if weight in tensors and _fits(tensors[name], tensors[weight], trials):
                owners[name] = weight
                break
    found: dict[str, list[str]] = {name: [] for name in tensors if name not in owners}
    for name, weight in owners.items():
        found[weight].append(name)
    return found


def _fits(vector: Tensor, matrix: Tensor, trials: int) -> bool:
    return matrix.dim() >= trials + 2 and vector.shape == matrix.shape[: trials + 1]
