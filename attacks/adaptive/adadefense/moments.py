"""The map from a gradient to AdaDefense's defended update, its derivatives, its inverse, its
error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.defenses import AdaDefense

UNIT = 2.0**-24
"""Unit roundoff of float32, in which clients compute."""

_TINY = 2.0**-126
_ROUNDINGS = 9.0
"""Roundings on the way from g to the defended update: lerp 2, second moment 3, root 2, quotient
2."""


@dataclass(frozen=True)
class Moments:
    """First and second moments after ``rounds`` uploads, float64 ``(D,)``, with error bounds."""

    rounds: int
    m: Tensor
    v: Tensor
    m_error: Tensor
    v_error: Tensor

    @classmethod
    def zero(cls, size: int) -> Moments:
        """The state with which every client starts."""
        z = torch.zeros(size, dtype=torch.float64)
        return cls(0, z, z, z, z)


@dataclass(frozen=True)
class Slopes:
    """Value and derivatives of the defended update at g, each ``(D,)``.

    ``root_v`` is twice the root's slope in v: that bounds the change of a concave root down to 0.
    """

    value: Tensor
    root: Tensor
    g: Tensor
    gg: Tensor
    m: Tensor
    root_v: Tensor


class DefendedUpdate:
    """One round of AdaDefense at given moments, in float64 and without alpha.

    With ``A = a0 + a1 g`` and ``Q = sqrt(w + c g^2)`` the defended update is ``t = A / (Q + e)``:
    a0 is the corrected first moment carried over, w the second (with epsilon where it is inside the
    root), e epsilon where it is outside.
    """

    def __init__(self, hyper: AdaDefense, before: Moments) -> None:
        r = before.rounds + 1
        corrected = hyper.bias_correction
        adagrad = hyper.variant == "adagrad"
        self.before = before
        self.first = 1.0 - hyper.beta1**r if corrected else 1.0
        self.second = 1.0 - hyper.beta2**r if corrected else 1.0
        self.beta1 = hyper.beta1
        self.keep = hyper.beta2 if hyper.variant == "adam" else 1.0
        self.gain = 1.0 if adagrad else 1.0 - hyper.beta2
        inside = hyper.eps_placement == "inside"
        self.e = 0.0 if inside else hyper.epsilon
        if hyper.eps_placement == "uncorrected":
            self.e = hyper.epsilon / math.sqrt(self.second)
        self.a0 = hyper.beta1 * before.m / self.first
        self.a1 = (1.0 - hyper.beta1) / self.first
        self.c = self.gain / self.second
        self.w = self.keep * before.v / self.second + (hyper.epsilon if inside else 0.0)

    @property
    def asymptote(self) -> float:
        """Limit of the size of the defended update for large g."""
        return self.a1 / math.sqrt(self.c)

    @property
    def bound(self) -> Tensor:
        """Largest size of the defended update at these moments, by Cauchy-Schwarz, ``(D,)``."""
        carried = torch.where(self.w > 0, self.a0.square() / self.w.clamp_min(1e-300), 0.0)
        return (carried + self.asymptote**2).sqrt()

    def slopes(self, g: Tensor) -> Slopes:
        """Evaluate the map and its derivatives at g."""
        q = (self.w + self.c * g.square()).sqrt().clamp_min(1e-100)
        root = q + self.e
        a = self.a0 + self.a1 * g
        bend = self.c * g / q
        curve = self.c / q * (1.0 - self.c * (g / q).square())
        return Slopes(
            value=a / root,
            root=root,
            g=self.a1 / root - a * bend / root.square(),
            gg=-2.0 * self.a1 * bend / root.square()
            - a * curve / root.square()
            + 2.0 * a * bend.square() / root**3,
            m=self.beta1 / self.first / root,
            root_v=self.keep / (self.second * q),
        )

    def candidates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Both solutions of ``t Q = A - t e``, squared, and which of them solve it unsquared.

        The quadratic is ``(a1^2 - t^2 c) g^2 + 2 a1 b g + b^2 - t^2 w = 0`` with ``b = a0 - t e``;
        its discriminant is taken in the form without cancellation.

        Returns
        -------
        tuple of Tensor
            Float64 and bool, ``(2, D)``.
        """
        b = self.a0 - t * self.e
        lead = self.a1**2 - t.square() * self.c
        inner = self.w * lead + self.c * b.square()
        half = t.abs() * inner.clamp_min(0.0).sqrt()
        q = -(self.a1 * b + torch.where(b < 0, -half, half))
        w_root = self.w.sqrt()
        end = (b - t * w_root) * (b + t * w_root)
        found = torch.stack([q / lead, torch.where(q == 0, 0.0, end / q)])
        finite = found.isfinite()
        found = torch.where(finite, found, 0.0)
        side = b + self.a1 * found
        valid = finite & ((side.sign() == t.sign()) | (t == 0)) & (inner >= 0)
        return found, valid

    def resolution(self, t: Tensor, g: Tensor, at: Slopes) -> Tensor:
        """Bound on the rounding error of a float32 client's defended update, ``(D,)``.

        Each of nine roundings moves it by 2^-24 of its size; where the carried moment and the new
        gradient cancel, each moves it by 2^-24 of theirs.
        """
        terms = self.a0.abs() + self.a1 * g.abs()
        carried = torch.where(self.before.m == 0, torch.zeros_like(terms), 4.0 * terms / at.root)
        under = (t.abs() * math.sqrt(_TINY / self.second) + _TINY / self.first) / at.root
        return UNIT * (_ROUNDINGS * t.abs() + carried) + under

    def error(self, at: Slopes, t_error: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on g and on the defended update, from rounding and from the moments' errors.

        Solves ``|F'| d - |F''| d^2 / 2 = delta`` for d; near a turning point, where no d does,
        returns what covers both branches.
        """
        root_error = torch.minimum(
            at.root_v * self.before.v_error,
            (self.keep * self.before.v_error / self.second).sqrt(),
        )
        delta = t_error + at.m * self.before.m_error + at.value.abs() * root_error / at.root
        slope, bend = at.g.abs(), at.gg.abs()
        gap = slope.square() - 2.0 * bend * delta
        near = 2.0 * delta / (slope + gap.clamp_min(0.0).sqrt())
        across = (slope + (slope.square() + 2.0 * bend * delta).sqrt()) / bend
        wide = torch.where(gap >= 0, near, across)
        return torch.where(delta == 0, 0.0, wide).nan_to_num(float("inf"), float("inf")), delta

    def after(self, t: Tensor, g: Tensor, g_error: Tensor, t_error: Tensor) -> Moments:
        """Advance the moments as the client did, with the smaller of two bounds on each error.

        The first moment's error follows from that of g or, since ``A = t (Q + e)``, directly from
        the defended update; without the latter, bounds would grow by 1.8 a round.
        """
        m = self.beta1 * self.before.m + (1.0 - self.beta1) * g
        v = self.keep * self.before.v + self.gain * g.square()
        v_error = self.keep * self.before.v_error + self.gain * (2 * g.abs() + g_error) * g_error
        at = self.slopes(g)
        root_error = torch.minimum(
            at.root_v / self.keep * v_error if self.keep else v_error.sqrt(),
            (v_error / self.second).sqrt(),
        )
        through_g = self.beta1 * self.before.m_error + (1.0 - self.beta1) * g_error
        direct = self.first * (at.root * t_error + t.abs() * root_error)
        m_error = torch.fmin(through_g, direct) + 3.0 * UNIT * m.abs() + _TINY
        v_error = v_error + 4.0 * UNIT * v + _TINY
        return Moments(
            self.before.rounds + 1,
            m,
            v,
            m_error.nan_to_num(float("inf"), float("inf")),
            v_error.nan_to_num(float("inf"), float("inf")),
        )


def largest_defended_update(hyper: AdaDefense, rounds: int) -> float:
    """Largest defended update that any gradients can cause in that round, without alpha.

    By Cauchy-Schwarz, ``|m| / sqrt(v)`` is at most the root of ``sum_k u_k^2 / s_k`` for the
    weights u and s of the k-th latest gradient. Yogi's second moment is no such sum after round
    1, so there is no bound.
    """
    if hyper.variant == "yogi" and rounds > 1:
        return math.inf
    total = 0.0
    for k in range(rounds):
        kept = 1.0 if hyper.variant == "adagrad" else (1.0 - hyper.beta2) * hyper.beta2**k
        taken = (1.0 - hyper.beta1) * hyper.beta1**k
        if taken and not kept:
            return math.inf
        total += taken**2 / kept if taken else 0.0
    if hyper.bias_correction:
        second = 1.0 - hyper.beta2**rounds
        return math.sqrt(total * second) / (1.0 - hyper.beta1**rounds)
    return math.sqrt(total)
