"""Truncated SVD: each layer's update, its smallest singular values left out (Luo et al. 2026)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses.base import DEFENSES, Defense, ProtectContext, Stage
from bract.protocol.update import Tensors


@DEFENSES.register("truncated-svd")
class TruncatedSVD(Defense):
    """Send the approximation of lowest rank that keeps a share of each layer's energy.

    The basis of SVDefense (Luo, Yau and Song, NDSS 2026): of a layer's ``G = sum_i s_i u_i v_i^T``
    with ``s_1 >= s_2 >= ...`` the first k terms are sent, k the least number for which
    ``s_1^2 + ... + s_k^2`` is at least ``energy`` of the whole sum.

    Deviations: SVDefense sets each client's threshold by the entropy of its singular values, weighs
    channels before it decomposes them, and has the server weigh layers. Here the threshold is one
    number for all, and nothing is weighted: what is measured of it holds for the truncation alone.

    A convolution is the matrix of its output channels. A bias is one more column of its layer's
    matrix. Other vectors (of a normalisation) have rank 1 and are sent as they are, and so is the
    gradient of one image in a linear layer.

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
        self._report.clear()
        self._report |= {"rank_kept": sum(kept) / len(kept)}
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
    for name, value in tensors.items():
        if _weight_of(name, tensors, trials) is not None:
            continue
        if value.dim() > trials + 1:
            matrix = value.flatten(trials + 1)
        else:
            matrix = value.reshape(*value.shape[:trials], -1, 1)
        bias = tensors.get(_bias_of(name))
        if bias is not None and _weight_of(_bias_of(name), tensors, trials) == name:
            matrix = torch.cat([matrix, bias.unsqueeze(-1)], dim=-1)
        made[name] = matrix
    return made


def from_layer_matrices(
    matrices: Mapping[str, Tensor], like: Mapping[str, Tensor], trials: int = 0
) -> Tensors:
    """Return what `layer_matrices` made matrices of, in the order and dtypes of ``like``."""
    found = {}
    for name, value in like.items():
        weight = _weight_of(name, like, trials)
        if weight is not None:
            part = matrices[weight][..., -1]
        else:
            part = matrices[name][..., : math.prod(value.shape[trials + 1 :])]
        found[name] = part.reshape(value.shape).to(value.dtype)
    return found


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""


def _weight_of(name: str, tensors: Mapping[str, Tensor], trials: int) -> str | None:
    """Return the weight whose matrix holds this bias; None of what is no bias of a matrix."""
    if not name.endswith("bias"):
        return None
    weight = f"{name.removesuffix('bias')}weight"
    of, bias = tensors.get(weight), tensors[name]
    if of is None or of.dim() < trials + 2 or bias.shape != of.shape[: trials + 1]:
        return None
    return weight
