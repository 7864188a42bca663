"""Parameters with more than one name, as language models tie their two embeddings.

A state dict holds such a parameter under each of its names. What leaves a client of it is made of
the update of the first, which defenses saw, under the others too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from bract.updates.update import Tensors, apply_update


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return further names of tied parameters, each with the name that comes first."""
    first = {id(value): name for name, value in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in every if first[id(value)] != name}


@dataclass(frozen=True)
class Ties:
    """The tied parameters of a model before it trains.

    Attributes
    ----------
    first
        Further names, each with the first.
    received
        CPU copies of the values under the further names.
    """

    first: Mapping[str, str]
    received: Tensors

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return those of a model that holds what was received."""
        first, held = ties_of(model), dict(model.named_parameters())
        return cls(first, {n: held[first[n]].detach().cpu().clone() for n in first})

    def after(self, update: Mapping[str, Tensor], lr: float) -> Tensors:
        """Return what becomes of them under their further names.

        Parameters
        ----------
        update
            As it leaves the client, with the first names among its own.
        lr
            The server's.
        """
        step = {name: update[self.first[name]].to(v.dtype) for name, v in self.received.items()}
        return apply_update(self.received, step, lr)
