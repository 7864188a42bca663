"""Distances of gradients that attacks on texts minimise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks import Cosine
from bract.attacks.problem.objectives import weighted_sum
from bract.updates.update import Tensors

_ZERO = torch.zeros(())


@dataclass(frozen=True)
class SquaredAndAbsolute:
    """Squared plus absolute differences (TAG, Deng et al. 2021, eq. 2).

    Attributes
    ----------
    absolute
        Factor of the absolute differences, in the first layer as in the others; 0.01 in the code
        of LAMP.
    """

    component: ClassVar[str] = "squared and absolute error matching"

    absolute: float = 0.01

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return ``|s - c|^2 + absolute |s - c|_1``."""
        return weighted_sum(
            lambda s, c: (s - c).square() + self.absolute * (s - c).abs(),
            simulated,
            captured,
            weights,
        )


@dataclass(frozen=True)
class LayerCosine:
    """Mean over tensors of one minus the cosine of each (LAMP, Balunovic et al. 2022, eq. 3)."""

    component: ClassVar[str] = "cosine matching of layers"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return a mean in [0, 2] over the tensors that hold a gradient at all."""
        each = [
            Cosine()({name: simulated[name]}, {name: value}, weights)
            for name, value in captured.items()
            if bool(value.any())
        ]
        if not each:
            # A capture of zeros tells nothing: all candidates are as near.
            return sum((value.flatten(1).sum(1) * 0.0 for value in simulated.values()), start=_ZERO)
        return torch.stack(each).mean(dim=0)
