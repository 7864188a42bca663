"""The generator's upsampling convolution for many trials, each with its own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bract.attacks.problem.constants import constant

_MERGED = (((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)), ((1.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
"""Taps, of three, that fall on the same small pixel, for an even and an odd large pixel."""


def upsampling_convolution(features: Tensor, weight: Tensor) -> Tensor:
    """Double the side by nearest neighbours, then convolve 3x3 without bias.

    Equal to ``conv2d(interpolate(x, scale_factor=2), w, padding=1)`` trial by trial, to rounding.
    After the doubling, three taps of the kernel see two small pixels only, so each of the four
    positions (even or odd row, even or odd column) of the large image is a 2x2 convolution of
    the small one: 16 products instead of 36 for each small pixel. A shift of the padded, flattened
    image is a view, so the convolution is four matrix products a trial and no patch is copied.
    Differentiable once.

    Parameters
    ----------
    features
        ``(L, inputs, B, h, w)``: channels before images, so that a trial's images are adjacent.
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
        trials, inputs, images, height, width = features.shape
        outputs = weight.shape[2] // inputs
        count = _columns(images, height, width)
        padded = features.new_zeros(trials, inputs, count + width + 3)
        _inner(padded, features.shape).copy_(features)
        kernels = torch.matmul(_merge(weight), weight).view(trials, 4, 4 * outputs, inputs)
        large = features.new_empty(trials, 4 * outputs, count)
        for tap, shift in enumerate(_shifts(width)):
            seen = padded[:, :, shift : shift + count]
            torch.baddbmm(large, kernels[:, tap], seen, beta=1.0 if tap else 0.0, out=large)
        found = features.new_empty(trials, outputs, images, 2 * height, 2 * width)
        for row in range(2):
            for column in range(2):
                found[..., row::2, column::2] = _parity(large, found, row, column)
        ctx.save_for_backward(padded, kernels)
        ctx.shape = features.shape
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        padded, kernels = ctx.saved_tensors
        trials, _, images, height, width = ctx.shape
        outputs = gradient.shape[1]
        count = _columns(images, height, width)
        large = padded.new_zeros(trials, 4 * outputs, count)
        for row in range(2):
            for column in range(2):
                _parity(large, gradient, row, column).copy_(gradient[..., row::2, column::2])
        to_kernels = torch.empty_like(kernels)
        to_padded = torch.zeros_like(padded)
        for tap, shift in enumerate(_shifts(width)):
            seen = padded[:, :, shift : shift + count]
            torch.bmm(large, seen.transpose(1, 2), out=to_kernels[:, tap])
            to_padded[:, :, shift : shift + count] += torch.bmm(
                kernels[:, tap].transpose(1, 2), large
            )
        to_weight = torch.matmul(_merge(kernels).T, to_kernels.view(trials, 16, -1))
        return _inner(to_padded, ctx.shape), to_weight


def _columns(images: int, height: int, width: int) -> int:
    """Positions of the padded images that are computed, in whole vectors: odd ends are slow."""
    return -(-(images * (height + 2) * (width + 2) - width - 3) // 16) * 16


def _inner(padded: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The images ``(L, C, B, h, w)`` inside their flattened margin of one pixel."""
    *_, height, width = shape
    row, trial, channel = width + 2, padded.stride(0), padded.stride(1)
    return padded.as_strided(shape, (trial, channel, (height + 2) * row, row, 1), row + 1)


def _parity(large: Tensor, image: Tensor, row: int, column: int) -> Tensor:
    """View the product at the even or odd pixels of ``image`` ``(L, C, B, 2h, 2w)``."""
    trials, outputs, images, height, width = image.shape
    height, width = height // 2, width // 2
    wide, trial, channel = width + 2, large.stride(0), large.stride(1)
    start = (2 * row + column) * outputs * channel + row * wide + column
    return large.as_strided(
        (trials, outputs, images, height, width),
        (trial, channel, (height + 2) * wide, wide, 1),
        start,
    )


def _shifts(width: int) -> tuple[int, int, int, int]:
    return 0, 1, width + 2, width + 3


def _merge(like: Tensor) -> Tensor:
    """Return ``(16, 9)``: small tap (row, column) and parity (row, column) from the nine taps."""
    one = constant(_MERGED, like.dtype, like.device)
    return torch.einsum("aut,bvs->uvabts", one, one).reshape(16, 9)
