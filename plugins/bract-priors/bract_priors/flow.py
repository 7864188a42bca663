"""A flow from noise to images: its velocity network, and the integration along it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 4
"""Steps of the integration from noise to an image, one velocity each."""

_COARSEST = 4
_PATCHED = 16
_LEVELS = 3
_GROUP = 8
_HIGHEST = 150.0


class Flow(nn.Module):
    """Images from noise, by the ordinary differential equation of a rectified flow.

    A point moves along ``dx/dt = v(x, t)`` from standard normal noise z at t = 0 to an image at
    t = 1, with pixels in [-1, 1]; v is trained to be the mean of ``x1 - z`` over the straight lines
    ``x_t = (1 - t) z + t x1`` through a point (Liu, Gong and Liu, ICLR 2023; Lipman et al., ICLR
    2023). The network is a small U-Net of residual blocks, each of which gets t and the class as a
    scale and a shift (Perez et al. 2018); images of more than 16 pixels a side enter as patches.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` with H = W.
    width
        Channels at the finest of up to three sides, doubled at each coarser one.
    classes
        Classes whose one-hot rows it is conditioned on; 0 for none.
    """

    def __init__(self, image_shape: tuple[int, int, int], *, width: int, classes: int = 0) -> None:
        super().__init__()
        channels, side, _ = image_shape
        self.image_shape = image_shape
        self.patch = 1
        while side > _PATCHED and side % 2 == 0:
            side, self.patch = side // 2, 2 * self.patch
        widths = [width]
        while len(widths) < _LEVELS and side % 2 == 0 and side // 2 >= _COARSEST:
            side = side // 2
            widths.append(2 * widths[-1])
        hidden = 4 * width
        self.width = width
        self.condition = nn.Sequential(
            nn.Linear(2 * width + classes, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.first = nn.Conv2d(channels * self.patch**2, width, 3, padding=1)
        self.down = nn.ModuleList(_Block(w, hidden) for w in widths)
        self.coarser = nn.ModuleList(
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1) for w in widths[:-1]
        )
        self.middle = _Block(widths[-1], hidden)
        self.finer = nn.ModuleList(nn.Conv2d(2 * w, w, 1) for w in widths[:-1])
        self.up = nn.ModuleList(_Block(w, hidden) for w in widths[:-1])
        self.norm = _norm(width)
        self.last = nn.Conv2d(width, channels * self.patch**2, 3, padding=1)

    def velocity(self, points: Tensor, times: Tensor, labels: Tensor | None) -> Tensor:
        """Return v at points ``(N, C, H, W)`` and times ``(N,)`` in [0, 1], for label rows."""
        speeds = torch.linspace(0.0, math.log(_HIGHEST), self.width).exp().to(points)
        angles = times[:, None] * speeds
        about = torch.cat([angles.sin(), angles.cos()], dim=1)
        condition = self.condition(about if labels is None else torch.cat([about, labels], dim=1))
        features = self.first(F.pixel_unshuffle(points, self.patch))
        kept = []
        for level, block in enumerate(self.down):
            features = block(features, condition)
            if level < len(self.coarser):
                kept.append(features)
                features = self.coarser[level](features)
        features = self.middle(features, condition)
        for finer, block in zip(reversed(self.finer), reversed(self.up), strict=True):
            larger = F.interpolate(finer(features), scale_factor=2, mode="nearest")
            features = block(kept.pop() + larger, condition)
        made: Tensor = self.last(F.silu(self.norm(features)))
        return F.pixel_shuffle(made, self.patch)

    def forward(self, latent: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map noise ``(N, C * H * W)`` and label rows ``(N, classes)`` to images in [0, 1].

        By `STEPS` steps of Euler's method. Pixels are clipped, and their derivative is that without
        the clipping; those that overflow, under weights that training does not make, are grey.
        """
        points = latent.view(-1, *self.image_shape)
        for number in range(STEPS):
            times = points.new_full((len(points),), number / STEPS)
            points = points + self.velocity(points, times, labels) / STEPS
        pixels = (0.5 * (points + 1.0)).nan_to_num(0.5, 0.5, 0.5)
        return pixels + (pixels.clamp(0.0, 1.0) - pixels).detach()


class _Block(nn.Module):
    """Two 3x3 convolutions beside an identity, the second one told by scale and shift."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_norm(width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.condition = nn.Linear(hidden, 2 * width)
        last = self.convolutions[1]
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        inner = self.convolutions[0](F.silu(self.norms[0](features)))
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        inner = self.norms[1](inner) * (1.0 + scale) + shift
        added: Tensor = self.convolutions[1](F.silu(inner))
        return features + added


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(1 if width % _GROUP else width // _GROUP, width)
