"""Pruning: send only the largest coordinates of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses.base import DEFENSES, Defense, ProtectContext, Stage
from bract.updates.update import Tensors, flatten, unflatten


@DEFENSES.register("pruning")
class Pruning(Defense):
    """Set the smallest coordinates to zero (Deep Leakage from Gradients, section 5.2).

    Coordinates that did not move count as none: frozen layers, heads of other tasks, words that no
    text holds and units that a crafted model switches off would make up the share alone.

    Parameters
    ----------
    ratio
        Share of the coordinates that is dropped; floor(ratio * D) of the D that moved, ties by
        position.
    scope
        ``whole``: one ranking over all parameters. ``tensor``: the share holds in every tensor.
    """

    name: ClassVar[str] = "pruning"
    title: ClassVar[str] = "Pruning"
    summary: ClassVar[str] = "the largest coordinates only"
    stage: ClassVar[Stage] = Stage.SPARSIFY

    ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9
    scope: Literal["whole", "tensor"] = "whole"

    def at_least(self, other: Defense) -> bool:
        """Compare the shares that are dropped, in one scope."""
        if not isinstance(other, Pruning) or self.scope != other.scope:
            return False
        return self.ratio >= other.ratio

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the pruned update."""
        del state, context
        if self.scope == "whole":
            return unflatten(self._prune(flatten(update)), update)
        return {n: self._prune(v.reshape(-1)).reshape(v.shape) for n, v in update.items()}

    def _prune(self, vector: Tensor) -> Tensor:
        moved = vector.nonzero().flatten()
        dropped = int(self.ratio * len(moved))
        if dropped == 0:
            return vector.clone()
        sizes = vector[moved].abs()
        smallest = torch.topk(sizes, dropped, largest=False, sorted=False).indices
        return vector.index_fill(0, moved[smallest], 0.0)
