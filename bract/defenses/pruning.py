"""Pruning: send only the largest coordinates of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses.base import DEFENSES, Defense, ProtectContext, Stage
from bract.protocol.update import Tensors, flatten, unflatten


@DEFENSES.register("pruning")
class Pruning(Defense):
    """Set the smallest coordinates to zero (Deep Leakage from Gradients, section 5.2).

    Tensors that did not move count as none: frozen layers, and heads of other tasks, would make up
    the share alone.

    Parameters
    ----------
    ratio
        Share of the coordinates that is dropped; floor(ratio * D) of the D of tensors that moved,
        ties by position.
    scope
        ``whole``: one ranking over all parameters. ``tensor``: the share holds in every tensor.
    """

    name: ClassVar[str] = "pruning"
    title: ClassVar[str] = "Pruning"
    summary: ClassVar[str] = "the largest coordinates only"
    stage: ClassVar[Stage] = Stage.SPARSIFY

    ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    scope: Literal["whole", "tensor"] = "whole"

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the pruned update."""
        del state, context
        if self.scope == "tensor":
            return {n: self._prune(v.reshape(-1)).reshape(v.shape) for n, v in update.items()}
        moved = {name: value for name, value in update.items() if bool(value.any())}
        pruned = unflatten(self._prune(flatten(moved)), moved) if moved else {}
        return {name: pruned.get(name, value) for name, value in update.items()}

    def _prune(self, vector: Tensor) -> Tensor:
        dropped = int(self.ratio * vector.numel())
        if dropped == 0:
            return vector.clone()
        smallest = torch.topk(vector.abs(), dropped, largest=False, sorted=False).indices
        return vector.index_fill(0, smallest, 0.0)
