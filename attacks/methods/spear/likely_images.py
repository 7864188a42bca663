"""Images under noise, once the rows of L are known: at one scale, and as likely as images go."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.attacks.solve.regularizers import NaturalImages

_STEPS, _RATE = 300, 0.02
_DOUBT, _APART = 4.0, 0.05


def common_scale(shares: Tensor, rows: Tensor, deviation: float) -> Tensor:
    """Return factors ``(N,)`` of the rows of L that give every example the same share.

    The bias' gradient gives each row's scale with the noise of one pixel. An example's own gradient
    at the layer, which follows from image and label, gives its share of the batch much closer, and
    all examples of one gradient have one share. Ones where shares differ by more than noise makes,
    as those of images that were drawn twice or clipped by themselves.

    Parameters
    ----------
    shares
        ``(N,)``: the rows over the examples' own gradients.
    rows
        L, ``(N, m)``, at the scale of the bias.
    """
    middle = shares.median()
    doubt = _DOUBT * deviation / rows.norm(dim=1).clamp_min(1e-300) + _APART
    if not bool(middle > 0) or bool(((shares / middle - 1.0).abs() > doubt).any()):
        return torch.ones_like(shares)
    return shares.mean() / shares


def likely_images(
    problem: Problem, rows: Tensor, gradient: Tensor, deviation: float, start: Tensor
) -> Tensor:
    """Return the images with the highest posterior for known rows of L.

    Minimises ``|gradient - L^T x|^2 / (2 deviation^2)`` minus the logarithm of the prior
    (`NaturalImages`) over images in [0, 1], by Adam from ``start``.

    Parameters
    ----------
    rows, gradient
        L, ``(N, m)``, and the gradient of the weight, ``(m, pixels)``.
    start
        ``(N, C, H, W)`` with H = W.
    """
    model, prior = problem.target_model, NaturalImages()
    square = rows @ rows.T / deviation**2
    right = rows @ gradient / deviation**2
    images = start.clamp(0.0, 1.0).clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=_RATE)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _RATE * (1.0 - step / _STEPS)
        optimizer.zero_grad()
        inputs = model.normalise(images).flatten(1)
        error = 0.5 * (inputs * (square @ inputs)).sum() - (inputs * right).sum()
        (error + prior(problem, images[None]).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0.0, 1.0)
    return images.detach()
