"""Linear equations of a normalised convolution's input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_GAP = 1e3
"""Least ratio of the two smallest eigenvalues at which a solution is the only one."""

_DEAD = 1e-3
"""Deviation, relative to the largest channel's, below which gamma counts as zero."""

_RIDGE = 1e-15
"""Least eigenvalue, relative to the mean of all, that float64 resolves."""


@dataclass(frozen=True)
class Solution:
    """Input ``(C, H, W)`` of a convolution and the gradient by it, up to a factor and its inverse.

    ``scales (channels,)`` are up to the same factor; ``alone`` is whether there is no other.
    """

    values: Tensor
    slope: Tensor
    scales: Tensor
    misfit: float
    alone: bool


class ConvolutionSystem:
    """The equations of one convolution with normalisation, homogeneous in its input and scales.

    With v, what leaves the normalisation less its mean, and the pattern G of the loss's gradient
    by what enters it: ``centred(conv(x)) = s v`` and ``conv'(G) x = s dW``, where
    ``s = sqrt(var + eps) / gamma`` of each channel is unknown.

    Parameters
    ----------
    weight, gradient
        ``(channels, C, kH, kW)``, float64.
    shape
        ``(C, H, W)`` of the input.
    """

    def __init__(
        self, layer: nn.Conv2d, weight: Tensor, gradient: Tensor, shape: tuple[int, ...]
    ) -> None:
        self._weight, self._gradient = weight, gradient.flatten(1)
        self._shape = shape
        assert not isinstance(layer.padding, str)
        self._stride, self._padding = layer.stride, layer.padding
        self._dilation = layer.dilation
        self._grams: dict[tuple[bool, ...], Tensor] = {}
        count = math.prod(self._shape)
        basis = torch.eye(count, dtype=torch.float64).view(count, *self._shape)
        out = torch.cat([self._convolve(part).flatten(2) for part in basis.split(256)])
        out = out.permute(1, 2, 0)
        out = out - out.mean(1, keepdim=True)
        self._unit = float(out.square().mean().sqrt())
        self._out = out / self._unit
        numbers = torch.arange(1.0, count + 1, dtype=torch.float64).view(1, *self._shape)
        self._taken = F.unfold(
            numbers,
            tuple(self._weight.shape[2:]),
            dilation=self._dilation,
            padding=self._padding,
            stride=self._stride,
        )[0].long()

    def _convolve(self, images: Tensor) -> Tensor:
        return F.conv2d(
            images,
            self._weight,
            stride=self._stride,
            padding=self._padding,
            dilation=self._dilation,
        )

    def solve(self, value: Tensor, slope: Tensor, share: Tensor | None = None) -> Solution:
        """Solve for the input, given what leaves the normalisation and the gradient by it.

        Parameters
        ----------
        share
            ``var / (var + eps)`` of each channel; None counts eps as zero.
        """
        out = centred(value)
        square = out.square().mean((1, 2))
        live = square > _DEAD**2 * square.max()
        along = (slope * out).mean((1, 2)) / square.clamp_min(1e-300)
        along = along if share is None else along * share
        pattern = centred(slope) - out * along.view(-1, 1, 1)
        equations = self._weight_gradient(pattern)
        unit = equations.square().mean((1, 2)).sqrt().clamp_min(1e-300)
        equations = equations / unit.view(-1, 1, 1)
        right = [out.flatten(1) / self._unit, self._gradient / unit[:, None]]
        size = torch.cat(right, dim=1).norm(dim=1).clamp_min(1e-300)
        across = sum(
            torch.einsum("cr,crn->cn", part / size[:, None], rows)
            for part, rows in zip(right, (self._out, equations), strict=True)
        )
        assert isinstance(across, Tensor)
        backward = equations[live].flatten(0, 1)
        normal = self._gram(live) + backward.T @ backward - across[live].T @ across[live]
        vector, misfit, alone = _null_vector(normal)
        vector = vector * torch.where(vector.sum() < 0, -1.0, 1.0)
        scales = torch.where(live, (across @ vector) / size, 0.0)
        entering = torch.where(live, 1.0 / scales, 0.0).view(-1, 1, 1) * pattern
        values = vector.view(self._shape)
        with torch.enable_grad():
            at = values.clone().requires_grad_()
            (pulled,) = torch.autograd.grad(self._convolve(at[None])[0], at, entering)
        return Solution(values, pulled, scales, misfit, alone)

    def _gram(self, live: Tensor) -> Tensor:
        which = tuple(bool(flag) for flag in live)
        if which not in self._grams:
            forward = self._out[live].flatten(0, 1)
            self._grams[which] = forward.T @ forward
        return self._grams[which]

    def _weight_gradient(self, pattern: Tensor) -> Tensor:
        """Return the weight's gradient as a matrix on the input, ``(channels, entries, N)``."""
        channels, entries = len(pattern), len(self._taken)
        made = pattern.new_zeros(channels, entries, math.prod(self._shape) + 1)
        index = self._taken.expand(channels, *self._taken.shape)
        made.scatter_add_(2, index, pattern.flatten(1)[:, None].expand_as(index))
        return made[:, :, 1:]


def _null_vector(normal: Tensor) -> tuple[Tensor, float, bool]:
    """Return the vector of the smallest eigenvalue, this, and whether the next is far above.

    The value is relative to the mean of all.
    """
    normal = 0.5 * (normal + normal.T)
    mean = float(normal.diagonal().mean())
    ridge = torch.eye(len(normal), dtype=normal.dtype) * (_RIDGE * mean)
    factor = torch.linalg.cholesky(normal + ridge)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(normal), 2, generator=generator, dtype=normal.dtype)
    for _ in range(6):
        start = torch.linalg.qr(torch.cholesky_solve(start, factor)).Q
    values, turn = torch.linalg.eigh(start.T @ normal @ start)
    least, second = (max(float(v) / mean, _RIDGE) for v in values)
    return start @ turn[:, 0], least, second > _GAP * least


def centred(maps: Tensor) -> Tensor:
    """Return maps ``(C, H, W)`` less each channel's mean."""
    return maps - maps.mean((1, 2), keepdim=True)
