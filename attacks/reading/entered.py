"""Inputs of a layer of a client's model, as they are read off an update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.site import Site
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.span import Span
from bract.attacks.result import Determined


@dataclass(frozen=True, kw_only=True)
class Entered:
    """Inputs of a layer, row by row or as a space that they lie in.

    Attributes
    ----------
    site
        The layer.
    values
        float64 ``(N, width)``, one row an example, N at most their number; None where only a space
        is known.
    space
        Subspace in which what entered lies; None where values are known.
    slopes
        float64 ``(N, outputs)``: the loss' gradient of what left the layer, row by row; None where
        it is not read.
    labels
        int64 ``(N,)``; None where they are not read.
    errors
        How exact the gradients are that it was read off.
    certificate
        How far the update determines it, with what is read of ``others``.
    component
        How a record of what ran names the reading.
    others
        What entered further layers in the same examples.
    """

    site: Site
    values: Tensor | None = None
    space: Span | None = None
    slopes: Tensor | None = None
    labels: Tensor | None = None
    errors: Errors
    certificate: Determined
    component: str
    others: tuple[Entered, ...] = ()

    def __post_init__(self) -> None:
        assert (self.values is None) is not (self.space is None)

    @property
    def layers(self) -> tuple[Entered, ...]:
        """Readings of all layers, this one first."""
        return (self, *self.others)

    def outside(self, inputs: Tensor) -> Tensor:
        """Return what inputs ``(N, width)`` of the layer have outside of the space, by its unit.

        That is `Span.residual` of them, with a column of ones where a bias is read.
        """
        assert self.space is not None
        ones = inputs.new_ones(len(inputs), 1)
        return self.space.residual(torch.cat([inputs, ones], 1) if self.site.biased else inputs)
