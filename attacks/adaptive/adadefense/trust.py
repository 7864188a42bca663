"""Weights of coordinates from the bounds on their errors."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.adaptive.adadefense.inversion import Inversion

TRUST = tuple(0.05 * 10.0 ** (-k / 4) for k in range(13))
"""Errors, as shares of the resolved coordinates' root mean square, that may halve the trust."""

NOISE = 3e-4
"""Error wanted in what is matched, as a share of it; chosen on images that score nothing."""

ENOUGH = 0.3
"""Fewest coordinates that must carry the match, as a share of the resolved ones; chosen alike."""

_TYPICAL = 0.15
"""Typical error as a share of its bound."""


def trust(inverted: Inversion) -> Tensor:
    """Weights in [0, 1] from error bounds, ``(D,)``.

    With s the root mean square of the resolved coordinates and q of `TRUST`, the weight is
    ``1 / (1 + (error / (q s))^2)``, and 0 where the bound is no less than half the coordinate and
    above ``q s``. A large q lets noise in, a small one leaves too few coordinates to find an image
    by: q is the largest at which the typical error is `NOISE` of what is matched, but no smaller
    than leaves ``(sum w)^2 / sum w^2`` at `ENOUGH` of the resolved coordinates.
    """
    resolved = inverted.resolved & (inverted.g != 0)
    size = float(inverted.g[resolved].square().mean().sqrt()) if resolved.any() else 0.0
    weights = _weights(inverted, TRUST[0] * size)
    for share in TRUST[1:]:
        kept = weights > 0
        noise = (weights * (_TYPICAL * inverted.error).square())[kept].sum()
        if float(noise) <= NOISE**2 * float((weights * inverted.g.square())[kept].sum()):
            break
        fewer = _weights(inverted, share * size)
        if float(fewer.sum()) ** 2 < ENOUGH * int(resolved.sum()) * float(fewer.square().sum()):
            break
        weights = fewer
    return weights


def _weights(inverted: Inversion, scale: float) -> Tensor:
    weight = 1.0 / (1.0 + (inverted.error / max(scale, 1e-300)).square())
    lost = (inverted.error >= 0.5 * inverted.g.abs()) & (inverted.error > scale)
    return torch.where(lost, 0.0, weight)
