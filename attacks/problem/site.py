"""The layers whose gradients tell what entered them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.updates.update import Tensors


@dataclass(frozen=True)
class Site:
    """A layer whose weight's gradient is a sum of what left it times what entered it.

    Attributes
    ----------
    layer
        Name of the module.
    biased
        Whether the gradient of a bias is read with it.
    transposed
        Whether the weight is ``(inputs, outputs)``, as in GPT-2, and not ``(outputs, inputs)``.
    """

    layer: str
    biased: bool = False
    transposed: bool = False

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.layer}.weight" if self.layer else "weight"

    @property
    def bias(self) -> str:
        """Name of its bias."""
        return f"{self.layer}.bias" if self.layer else "bias"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are read."""
        return (self.weight, self.bias) if self.biased else (self.weight,)

    def turned(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the weight as ``(outputs, inputs)``.

        Its rows are sums of what entered.
        """
        return gradient.T if self.transposed else gradient.flatten(1)

    def rows(self, target: Tensors) -> Tensor:
        """Return the gradient ``(outputs, inputs)``, float64 on the CPU, of a target.

        With a bias it has one column more, the bias', into which every example enters as 1.
        """
        weight = self.turned(target[self.weight].cpu().double())
        if not self.biased:
            return weight
        return torch.cat([weight, target[self.bias].cpu().double()[:, None]], dim=1)
