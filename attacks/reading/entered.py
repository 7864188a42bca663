"""Inputs of a layer of a client's model, and how far an update determines them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.site import Site
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.span import GAP, Span


@dataclass(frozen=True)
class Determined:
    """The certificate of a reading: how far an update determines what entered, without the truth.

    Attributes
    ----------
    equations
        Independent numbers that are known of what entered.
    residual
        What the reading leaves of the gradient that it explains, at least 0.
    rounding
        Most of that which rounding may leave.
    """

    equations: int
    residual: float
    rounding: float

    @classmethod
    def by(cls, span: Span) -> Determined:
        """Return how far a span determines each row that entered: by the fall of its values."""
        return cls(span.room, 1.0 / span.gap, 1.0 if not span.clean else 1.0 / GAP)

    @property
    def sure(self) -> bool:
        """Return whether rounding accounts for all that is left."""
        return self.residual <= self.rounding

    @property
    def order(self) -> tuple[bool, int]:
        """Return what is larger of the better of two readings of one update."""
        return self.sure, self.equations


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
