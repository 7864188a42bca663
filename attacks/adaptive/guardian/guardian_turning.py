"""What Guardian makes of a candidate's gradient, in many trials at once and differentiably."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.defenses import Guardian
from bract.updates.update import Tensors

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_TINY = 1e-30


@dataclass(frozen=True)
class Turn:
    """Guardian's steps from delta = g, unrolled (`bract.defenses.Guardian.solve`).

    Attributes
    ----------
    hyper
        As the protocol declares them.
    scale
        Factor from an update to what is simulated.
    """

    hyper: Guardian
    scale: float

    def __call__(self, sent: Tensors) -> Tensors:
        """Turn each trial's gradient ``(L, ...)``, all tensors as one vector or each alone."""
        rows = {n: v.flatten(1) / self.scale for n, v in sent.items()}
        epsilon = self.hyper.epsilon
        if self.hyper.scope == "whole":
            sizes = [v.shape[1] for v in rows.values()]
            whole = self._turned(torch.cat(list(rows.values()), dim=1), epsilon)
            turned = dict(zip(rows, whole.split(sizes, dim=1), strict=True))
        else:
            turned = {n: self._turned(v, epsilon / math.sqrt(len(rows))) for n, v in rows.items()}
        return {n: (turned[n] * self.scale).view_as(v) for n, v in sent.items()}

    def _turned(self, g: Tensor, epsilon: float) -> Tensor:
        hyper = self.hyper
        length = _norm(g)
        delta = g
        m, v = torch.zeros_like(g), torch.zeros_like(g)
        least = hyper.min_cosine
        steep = least / math.sqrt(1.0 - least**2)
        for k in range(1, hyper.iterations + 1):
            s, n = _dot(g, delta), _norm(delta)
            a = -torch.sign(epsilon * length - s) + hyper.beta * torch.sign(s) / (length * n)
            c = -hyper.beta * s.abs() / (length * n**3)
            step = a * g + c * delta
            if hyper.optimizer == "adam":
                m = _BETA1 * m + (1.0 - _BETA1) * step
                v = _BETA2 * v + (1.0 - _BETA2) * step.square()
                correction = math.sqrt(1.0 - _BETA2**k)
                root = v.clamp_min(_TINY).sqrt() + _EPS * correction
                delta = delta - hyper.lr * correction / (1.0 - _BETA1**k) * m / root
            else:
                delta = delta - hyper.lr * step
            s, n = _dot(g, delta), _norm(delta)
            across = (n.square() - (s / length).square()).clamp_min(0.0)
            wanted = (across + _TINY).sqrt() * steep
            below = s < least * length * n
            delta = torch.where(below, delta + (wanted - s / length) / length * g, delta)
            delta = delta * (epsilon / _norm(delta)).clamp_max(1.0)
        return delta * length / _norm(delta) if hyper.length == "gradient" else delta


def _norm(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=1, keepdim=True).clamp_min(_TINY).sqrt()


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(dim=1, keepdim=True)
