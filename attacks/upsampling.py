"""The generator's upsampling convolution for many lanes, each with its own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MERGED = (((1, 0, 0), (0, 1, 1)), ((1, 1, 0), (0, 0, 1)))
"""Which of three taps fall on the same small pixel, for an even and an odd large pixel."""


def upsampling_convolution(features: Tensor, weight: Tensor) -> Tensor:
    """Double the side by nearest neighbours, then convolve 3x3 without bias.

    Equal to ``conv2d(interpolate(x, scale_factor=2), w, padding=1)`` lane by lane, to rounding.
    After the doubling, three taps of the kernel see two small pixels only, so each of the four
    positions (even or odd row, even or odd column) of the large image is a 2x2 convolution of
    the small one: 16 products instead of 36 for each small pixel. A shift of the padded, flattened
    image is a view, so the convolution is four matrix products a lane and no patch is copied.
    Differentiable once.

    Parameters
    ----------
    features
        ``(L, inputs, B, h, w)``: channels before images, so that a lane's images lie side by side.
    weight
        ``(L, 9, outputs * inputs)``: kernel row and column first, see `pack_kernel`.

    Returns
    -------
    Tensor
        ``(L, outputs, B, 2h, 2w)``.
    """
    result: Tensor = _Convolution.apply(features, weight)
    return result


def pack_kernel(kernel: Tensor) -> Tensor:
    """Reorder ``(outputs, inputs, 3, 3)`` to ``(9, outputs * inputs)``."""
    return kernel.permute(2, 3, 0, 1).reshape(9, -1).contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        lanes, inputs, images, height, width = features.shape
        outputs = weight.shape[2] // inputs
        padded = torch.nn.functional.pad(features, (1, 1, 1, 1)).flatten(2)
        merge = _merge(weight)
        kernels = torch.matmul(merge, weight).view(lanes, 4, 4 * outputs, inputs)
        count = padded.shape[2] - width - 3
        # Columns beyond `count` are never read: they would reach past the last row.
        large = padded.new_empty(lanes, 4 * outputs, padded.shape[2])
        made = large[:, :, :count]
        for tap, shift in enumerate(_shifts(width)):
            seen = padded[:, :, shift : shift + count]
            if tap:
                made.baddbmm_(kernels[:, tap], seen)
            else:
                torch.bmm(kernels[:, 0], seen, out=made)
        found = features.new_empty(lanes, outputs, images, 2 * height, 2 * width)
        by_parity = large.view(lanes, 2, 2, outputs, images, height + 2, width + 2)
        for row in range(2):
            for column in range(2):
                found[..., row::2, column::2] = by_parity[
                    :, row, column, ..., row : row + height, column : column + width
                ]
        ctx.save_for_backward(padded, kernels)
        ctx.shape = features.shape
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        padded, kernels = ctx.saved_tensors
        lanes, inputs, images, height, width = ctx.shape
        outputs = gradient.shape[1]
        slope = padded.new_zeros(lanes, 2, 2, outputs, images, height + 2, width + 2)
        for row in range(2):
            for column in range(2):
                slope[:, row, column, ..., row : row + height, column : column + width] = gradient[
                    ..., row::2, column::2
                ]
        count = padded.shape[2] - width - 3
        flat = slope.view(lanes, 4 * outputs, -1)[:, :, :count]
        to_kernels = torch.empty_like(kernels)
        to_padded = torch.zeros_like(padded)
        for tap, shift in enumerate(_shifts(width)):
            seen = slice(shift, shift + count)
            torch.bmm(flat, padded[:, :, seen].transpose(1, 2), out=to_kernels[:, tap])
            to_padded[:, :, seen].baddbmm_(kernels[:, tap].transpose(1, 2), flat)
        merge = _merge(kernels)
        to_weight = torch.matmul(merge.T, to_kernels.view(lanes, 16, -1))
        grid = to_padded.view(lanes, inputs, images, height + 2, width + 2)
        return grid[..., 1:-1, 1:-1], to_weight


def _shifts(width: int) -> tuple[int, int, int, int]:
    return 0, 1, width + 2, width + 3


def _merge(like: Tensor) -> Tensor:
    """Return ``(16, 9)``: small tap (row, column) and parity (row, column) from the nine taps."""
    one = like.new_tensor(_MERGED)
    return torch.einsum("aut,bvs->uvabts", one, one).reshape(16, 9)
