"""Layers that draw in secret and add a term of their own to the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bract.crypto.randomness import SecretStream


class OwnLoss(nn.Module):
    """A layer with secret draws and a loss of its own, of which a server and an attacker know.

    In evaluation mode it draws nothing.

    Attributes
    ----------
    stream
        Where its draws come from; None takes a fresh key from the operating system each time,
        because a server that can replay the noise undoes the defense.
    term
        Its loss of the batch that it saw last; None before.
    adds_loss
        Whether training adds ``term`` to the loss by itself, for a training loop that does not
        know of it (`auxiliary_loss`). What the loss prints as stays the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream: SecretStream | None = None
        self.term: Tensor | None = None
        self.adds_loss = False

    def with_term(self, values: Tensor, term: Tensor) -> Tensor:
        """Keep the loss of this batch, and return ``values`` with it where it `adds_loss`."""
        self.term = term
        if self.adds_loss and self.training:
            found: Tensor = _AddedLoss.apply(values, term)
            return found
        return values

    def __getstate__(self) -> dict[str, Any]:
        # The last batch's graph cannot be copied, and a copy of the model has seen no batch.
        return {**self.__dict__, "term": None}


class _AddedLoss(torch.autograd.Function):
    """Pass values on, and let ``loss`` take part in whatever loss is made of them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        del ctx, loss
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return gradients[0], gradients[0].new_ones(())


def own_losses(model: nn.Module) -> list[OwnLoss]:
    """Return the layers of ``model`` with a loss of their own."""
    return [module for module in model.modules() if isinstance(module, OwnLoss)]


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the model's own loss term of the batch it saw last; 0 for most models."""
    total = torch.zeros(())
    for layer in own_losses(model):
        if layer.term is not None:
            total = total.to(layer.term.device) + layer.term
    return total
