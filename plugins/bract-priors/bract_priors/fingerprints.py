"""What images are recognised by, and which images are copies of others by it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 8
"""Side to which images are reduced before they are compared."""

NEAR = 2
"""Most steps of 256 by which two fingerprints of one image differ: resizing and rounding."""

MOST_SHIFT = 4
"""Most pixels by which a copy is shifted; less where that is more than an eighth of the side."""

_ROWS = 1 << 13
_PAIRS = 1 << 14
_INNER = slice(1, SIDE - 1)


def fingerprints(images: Tensor) -> Tensor:
    """Return what images are recognised by: reduced to 8 pixels a side, in 256 steps.

    Parameters
    ----------
    images
        float32 ``(N, C, H, W)`` in [0, 1].

    Returns
    -------
    Tensor
        uint8 ``(N, C * 64)``.
    """
    small = F.adaptive_avg_pool2d(images.detach().cpu().float(), SIDE)
    return (small * 255.0).round().clamp(0.0, 255.0).to(torch.uint8).flatten(1)


def copies_among(images: Tensor, known: Tensor) -> Tensor:
    """Return which images are copies of some whose fingerprints are known, bool ``(N,)``.

    A copy is the image itself, mirrored or turned by right angles, and shifted by whole pixels: at
    most `MOST_SHIFT` of them and an eighth of the side, whatever is at the edge then. Two
    fingerprints are of one image where they differ by at most `NEAR` steps in every cell that the
    shift left whole, at least the inner 36 of 64. Images that were scaled, turned by other angles,
    shifted further, or changed in brightness or contrast are not found.

    Parameters
    ----------
    images
        float32 ``(N, C, H, W)`` in [0, 1].
    known
        uint8 ``(M, C * 64)``.
    """
    channels = images.shape[1]
    if not len(known) or known.shape[1] != channels * SIDE**2:
        return torch.zeros(len(images), dtype=torch.bool)
    return torch.tensor([_is_copy(image, known.view(-1, channels, SIDE, SIDE)) for image in images])


def _is_copy(image: Tensor, known: Tensor) -> bool:
    """Return whether a variant of one image ``(C, H, W)`` is among fingerprints ``(M, C, 8,
    8)``.
    """
    shifted, whole = zip(*_shifts(image.detach().cpu().float()), strict=True)
    asked = fingerprints(torch.stack(shifted)).view(-1, *known.shape[1:])
    cells = torch.stack(whole)
    turned = [_turned(asked, i) for i in range(8)]
    asked, cells = torch.cat(turned), torch.cat([_turned(cells, i) for i in range(8)])
    inner = asked[..., _INNER, _INNER].flatten(1).float()
    most = float(NEAR**2 * inner.shape[1])
    for rows in known.split(_ROWS):
        # Sums of squares of whole numbers, below 2^24 for three channels: float32 holds them.
        own = rows[..., _INNER, _INNER].flatten(1).float()
        squares = inner.square().sum(1)[:, None] + own.square().sum(1) - 2.0 * inner @ own.T
        # In pieces: known fingerprints may be made so that very many come this far.
        for variant, row in (p.unbind(1) for p in (squares <= most).nonzero().split(_PAIRS)):
            off = (asked[variant].to(torch.int16) - rows[row].to(torch.int16)).abs()
            if bool(((off * cells[variant][:, None]).flatten(1).amax(1) <= NEAR).any()):
                return True
    return False


def _shifts(image: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Shift an image; with each, which cells of its fingerprint hold none of the edge, (8, 8)."""
    height, width = image.shape[-2:]
    most = min(MOST_SHIFT, min(height, width) // SIDE)
    padded = F.pad(image, (most,) * 4)
    inside = F.pad(torch.ones(1, height, width), (most,) * 4)
    for down in range(2 * most + 1):
        for right in range(2 * most + 1):
            at = (..., slice(down, down + height), slice(right, right + width))
            yield padded[at], F.adaptive_avg_pool2d(inside[at], SIDE)[0] > 1.0 - 1e-6


def _turned(cells: Tensor, which: int) -> Tensor:
    """Mirror or turn the last two dimensions, in one of the eight ways of a square."""
    found = torch.rot90(cells, which % 4, (-2, -1))
    return found.flip(-1) if which >= 4 else found
