"""Exactness of the evidence that a reading works on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import ARITHMETIC, UNIT, rounding
from bract.attacks.problem.client_model import BatchGradient, DefendedForward
from bract.errors import BractError
from bract.updates.update import Tensors

Level = Literal["exact", "rounded", "noisy", "open"]
"""Exactness, the best first: a gradient's own float32 arithmetic, the difference of two rounded
models, errors of a known size, coordinates that are not known."""


@dataclass(frozen=True)
class Errors:
    """Errors of the gradients of some parameters, as far as an attacker knows them.

    Attributes
    ----------
    noise
        Standard deviation of the noise in each coordinate: 0 without noise, infinite where its size
        is not known.
    rounding
        Relative error that float32 may leave in the worst of the tensors
        (`bract.attacks.problem.certificate.rounding`).
    uneven
        Whether some coordinates are known less well than others.
    bounded
        Whether the error of each coordinate is bounded then (`Evidence.errors`).
    doubtful
        Whether a coordinate has alternatives, bounds or a direction along which it is not known.
    """

    noise: float
    rounding: float
    uneven: bool
    bounded: bool
    doubtful: bool

    @classmethod
    def of(cls, case: Case, names: Sequence[str]) -> Errors:
        """Return the errors of the gradients of these parameters.

        Raises
        ------
        BractError
            If the evidence has no gradient of one of them.
        """
        evidence, key = case.evidence, case.observation.key
        if missing := [name for name in names if name not in evidence.target]:
            raise BractError(
                f"{key}: the evidence lacks {', '.join(missing)}", code="attack-evidence"
            )
        doubtful = [evidence.alternatives, evidence.bounds, evidence.nuisance]
        weights = [(evidence.weights or {}).get(name) for name in names]
        noise = (evidence.deviation or math.inf) if evidence.noisy else 0.0
        return cls(
            noise=noise,
            rounding=max((rounding(case, name) for name in names), default=0.0),
            uneven=any(w is not None and bool((w != w.flatten()[0]).any()) for w in weights),
            bounded=bool(evidence.errors),
            doubtful=any(
                group and any(name in group and bool(group[name].any()) for name in names)
                for group in doubtful
            ),
        )

    @property
    def level(self) -> Level:
        """Return how exact the gradients are at their worst."""
        if self.doubtful or self.noise == math.inf or (self.uneven and not self.bounded):
            return "open"
        if self.noise or self.uneven:
            return "noisy"
        return "exact" if self.rounding <= ARITHMETIC else "rounded"


def require_one_gradient(case: Case, attack: str) -> None:
    """Refuse what is no gradient of one batch, computed in one step of plain SGD."""
    forward = case.forward
    if isinstance(forward, DefendedForward) and forward.only_shortens:
        forward = forward.client
    if not case.law.one_gradient or not isinstance(forward, BatchGradient):
        raise BractError(
            f"{case.observation.key}: the update is no gradient of one batch; {attack} needs one "
            "step of plain SGD",
            code="attack-unsuited",
        )


def require_exact(
    case: Case,
    names: Sequence[str],
    attack: str,
    *,
    uneven_with_errors: bool = False,
    under_noise: bool = False,
) -> Errors:
    """Return the errors of these parameters' gradients; refuse those that leave coordinates open.

    Parameters
    ----------
    uneven_with_errors
        Whether coordinates may be known unevenly where the evidence bounds the error of each.
    under_noise
        Whether noise of a known deviation leaves nothing open.
    """
    errors = Errors.of(case, names)
    if (
        errors.doubtful
        or (errors.noise and not (under_noise and errors.noise < math.inf))
        or (errors.uneven and not (uneven_with_errors and errors.bounded))
    ):
        raise BractError(
            f"{case.observation.key}: the defense leaves coordinates of {names[0]} open; {attack} "
            "needs all of them, to rounding",
            code="attack-evidence",
        )
    return errors


def deviations_of(case: Case, own: Tensors) -> Tensors:
    """Return the standard deviation of every coordinate of the target, as far as it is known.

    That is declared noise, what the evidence bounds or trusts, and of FedAvg the rounding of
    float32 weights, whose difference the update is. Bounds on an inversion's errors, infinite where
    nothing is known, and trust are known but for a common factor.
    """
    evidence, law = case.read or case.evidence, case.law
    deviation = evidence.deviation
    found = {}
    for name, value in own.items():
        if deviation:
            found[name] = torch.full_like(value, deviation)
        elif name in (evidence.errors or {}):
            assert evidence.errors is not None
            error, size = evidence.errors[name].double().cpu(), evidence.target[name].abs().cpu()
            found[name] = torch.maximum(error, UNIT * size.double()).to(value.dtype)
        elif name in (evidence.weights or {}):
            assert evidence.weights is not None
            # A weight is 1 / (1 + (deviation / scale)^2) of one scale, which is not known.
            weight = evidence.weights[name].double().cpu()
            spread = (1.0 / weight - 1.0).clamp_min(0.0).sqrt()
            found[name] = spread.clamp_min(UNIT).to(value.dtype)
        elif name in (evidence.bounds or {}):
            assert evidence.bounds is not None
            bound = evidence.bounds[name].double().cpu() / 3.0**0.5
            rounding = UNIT * float(evidence.target[name].abs().max())
            if float(bound.max()) > rounding:
                found[name] = bound.clamp_min(max(rounding, 1e-30)).to(value.dtype)
        elif law.averaging and law.lr:
            size = value.abs().clamp_min(value.square().mean().sqrt())
            found[name] = UNIT / (law.lr * law.counted) * size
    return found
