"""Equations of a gradient for the map that entered a block with max pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.pooled_places.blocks import Block

NARROWEST = 1e-7
"""Width of the shares, in outputs of the convolution, at which the highest place has all."""


@dataclass(frozen=True)
class Equations:
    """Equations for the map ``(N,)`` that entered a block; float64 on the CPU.

    The outputs ``z`` of a cell's places are linear in the map. The highest of them is known from
    what left the block, and so is the loss' gradient ``s`` of it; the weight's gradient is the sum
    over cells of ``s`` times the patch at the highest place. Here each place has a share, the
    softmax of its cell's outputs over a width, so that a derivative tells how places change.

    Attributes
    ----------
    maps
        ``(O, cells, places, N)``: the convolution, by cell.
    offset
        Its bias, ``(O,)``.
    seen
        int64 ``(cells, places, F)``: which values of the map each place sees; N for padding.
    gradient
        Of the weight, ``(O, F)``.
    highest, slopes
        Highest output of each cell, and the loss' gradient of it, ``(O, cells)``.
    trust
        Weight of each highest output; 0 where the activation hides it.
    """

    maps: Tensor
    offset: Tensor
    seen: Tensor
    gradient: Tensor
    highest: Tensor
    slopes: Tensor
    trust: Tensor

    @classmethod
    def of(
        cls,
        block: Block,
        weight: Tensor,
        bias: Tensor,
        gradient: Tensor,
        pooled: Tensor,
        slopes: Tensor,
    ) -> Equations:
        """Return them for what left the block and the loss' gradient of it, ``(O * cells,)``."""
        seen = _seen(block, weight)
        filters, count = len(weight), math.prod(block.entered)
        shape = (filters, *seen.shape[:2], count + 1)
        rows = weight.flatten(1)[:, None, None].expand(-1, *seen.shape[:2], -1)
        maps = weight.new_zeros(shape).scatter_add_(3, seen[None].expand(filters, -1, -1, -1), rows)
        values, behind = pooled.view(filters, -1), slopes.view(filters, -1)
        steep = block.activation.slope(values)
        highest = block.activation.inverse(values)
        spread = highest[steep > 0].std(correction=0).clamp_min(1e-12)
        trust = steep / (steep.square().mean().sqrt().clamp_min(1e-300) * spread)
        return cls(
            maps=maps[..., :-1].contiguous(),
            offset=bias,
            seen=seen,
            gradient=gradient.flatten(1),
            highest=highest,
            slopes=behind * steep,
            trust=trust,
        )

    @property
    def count(self) -> int:
        """Number of equations."""
        return self.gradient.numel() + int((self.trust > 0).sum())

    def outputs(self, values: Tensor) -> Tensor:
        """Return the convolution's outputs ``(O, cells, places)`` for a map ``(N,)``."""
        made = self.maps.view(-1, len(values)) @ values
        return made.view(self.maps.shape[:3]) + self.offset[:, None, None]

    def places(self, values: Tensor) -> Tensor:
        """Return the highest place of each cell, int64 ``(O, cells)``."""
        return self.outputs(values).argmax(-1)

    def entered_slopes(self, values: Tensor) -> Tensor:
        """Return the loss' gradient of the map, ``(N,)``, by its highest places."""
        at = torch.zeros(self.maps.shape[:3], dtype=values.dtype)
        at.scatter_(2, self.places(values)[..., None], self.slopes[..., None])
        return at.flatten() @ self.maps.view(-1, len(values))

    def errors(self, values: Tensor, width: float) -> Tensor:
        """Return relative errors of the gradient, then of the highest outputs, ``(E,)``."""
        outputs, patches = self.outputs(values), self._patches(values)
        return self._errors(outputs, (outputs / width).softmax(-1), patches)

    def left(self, values: Tensor) -> float:
        """Return the root mean square of the errors where the highest place has all."""
        return float(self.errors(values, NARROWEST).square().mean().sqrt())

    def linearised(self, values: Tensor, width: float) -> tuple[Tensor, Tensor]:
        """Return the errors ``(E,)`` and their derivatives by the map, ``(E, N)``."""
        outputs, patches = self.outputs(values), self._patches(values)
        shares = (outputs / width).softmax(-1)
        filters, count = len(self.maps), len(values)
        tops = (shares * outputs).sum(-1, keepdim=True)
        moved = shares * (1.0 + (outputs - tops) / width)
        by_tops = (moved[:, :, None] @ self.maps)[:, :, 0] * self.trust[..., None]
        # By the shares, then by the patches themselves.
        weighed = shares * self.slopes[..., None]
        mean = torch.einsum("ocj,cjf->ocf", shares, patches)
        apart = (patches - mean[:, :, None]) * (weighed / width)[..., None]
        turned = apart.flatten(1, 2).transpose(1, 2)
        made = torch.bmm(turned, self.maps.flatten(1, 2))
        by_gradient = torch.cat([made, made.new_zeros(*made.shape[:2], 1)], 2)
        seen = self.seen.flatten(0, 1).T
        direct = weighed.view(filters, 1, -1).expand(-1, len(seen), -1)
        by_gradient.scatter_add_(2, seen[None].expand(filters, -1, -1), direct)
        rows = (by_gradient[..., :-1] / self._size, by_tops)
        jacobian = torch.cat([part.reshape(-1, count) for part in rows])
        return self._errors(outputs, shares, patches), jacobian

    def _errors(self, outputs: Tensor, shares: Tensor, patches: Tensor) -> Tensor:
        filters, width = len(self.maps), patches.shape[-1]
        weighed = (shares * self.slopes[..., None]).view(filters, -1)
        made = (weighed @ patches.view(-1, width) - self.gradient) / self._size
        tops = ((shares * outputs).sum(-1) - self.highest) * self.trust
        return torch.cat([made.flatten(), tops.flatten()])

    def _patches(self, values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1)])[self.seen]

    @property
    def _size(self) -> Tensor:
        return self.gradient.square().mean().sqrt().clamp_min(1e-300)


def _seen(block: Block, weight: Tensor) -> Tensor:
    """Return which values of the map each place of each cell sees."""
    (down, across), (top, left), side = block.stride, block.padding, block.window
    _, _, high, wide = weight.shape
    count = math.prod(block.entered)
    at = torch.arange(count).view(block.entered)
    padded = torch.nn.functional.pad(at, (left, left, top, top), value=count)
    whole = padded.unfold(1, high, down).unfold(2, wide, across).permute(1, 2, 0, 3, 4)
    rows, columns = (length // side for length in whole.shape[:2])
    cells = whole[: rows * side, : columns * side].flatten(2)
    cells = cells.view(rows, side, columns, side, -1).transpose(1, 2)
    return cells.reshape(rows * columns, side * side, -1)
