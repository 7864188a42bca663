"""Against clipping and noise: what the known scale of the noise says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from bract.attacks.adaptive.declared import Declared, declared, gradient_scale
from bract.attacks.adaptive.factor import shrinkage
from bract.attacks.evidence import ADAPTIVE, Evidence
from bract.attacks.victim import victim_of
from bract.errors import BractError
from bract.observation import Observation
from bract.update import flatten


class NoiseHyper(Declared):
    """Declared hyper-parameters of clipping and noise."""

    kind: Literal["gaussian", "laplace"] = "gaussian"
    clip: float | None = 1.0
    std: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    accountant: Literal["zcdp", "opacus"] = "zcdp"

    def deviation(self) -> float | None:
        """Standard deviation on one coordinate; None where nothing determines it."""
        if self.std is not None:
            return self.std
        if self.epsilon is None or self.clip is None:
            return None
        if self.kind == "laplace":
            return math.sqrt(2.0) * 2.0 * self.clip / self.epsilon
        log = math.log(1.0 / self.delta)
        return 2.0 * self.clip / (math.sqrt(2.0) * (math.sqrt(log + self.epsilon) - math.sqrt(log)))


@ADAPTIVE.register("noise")
def discount_noise(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Weigh every tensor by the share of its energy that is not noise.

    With x the captured tensor and s the known deviation, the weight is
    ``max(0, 1 - s^2 / mean(x^2))``, the gain of the Wiener filter for that tensor.

    Clipping divides the whole update by one unknown factor of at least 1. ``notes["clipped"]``
    says whether the norm, without the noise expected in it, reaches the bound. If it does, the
    factor is read off the last layer where that tells it (`shrinkage`: one example, one step,
    little noise) and left open otherwise (`Evidence.unknown_factor`).

    Rounds are not averaged: the parameters move from one round to the next and so does the
    gradient, even of the same image; and clients draw other images. An attack on several rounds
    would have to match each at its own parameters.

    Raises
    ------
    BractError
        If the noise is not declared, or the update holds less energy than the declared noise
        alone would, or more than it and the clipping norm together (by six standard deviations).
    """
    del history
    hyper = declared(NoiseHyper, observation)
    deviation = hyper.deviation()
    if deviation is None:
        raise BractError(
            f"{observation.key}: the declared noise has neither std nor epsilon with clip; "
            "declare its scale in protocol.defenses"
        )
    vector = flatten(observation.update).to(torch.float64)
    energy, count = float(vector.square().sum()), vector.numel()
    fourth = 3.0 if hyper.kind == "gaussian" else 6.0
    doubt = 6.0 * math.sqrt((fourth - 1.0) / count)
    if energy < (1.0 - doubt) * count * deviation**2:
        raise BractError(
            f"{observation.key}: the root mean square is {math.sqrt(energy / count):.3g}, below "
            f"what the declared noise alone makes, {deviation:.3g}; correct protocol.defenses"
        )
    if hyper.clip is not None:
        # The 1-norm bounds the 2-norm.
        spread = deviation**2 * math.sqrt((fourth - 1.0) * count) + 2.0 * deviation * hyper.clip
        most = hyper.clip**2 * (1.0 + 1e-5) + count * deviation**2 + 6.0 * spread
        if energy > most:
            raise BractError(
                f"{observation.key}: the norm is {math.sqrt(energy):.4g}, but the declared "
                f"clipping to {hyper.clip} and noise of {deviation:.3g} allow "
                f"{math.sqrt(most):.4g}; correct protocol.defenses"
            )
    wanted = observation.gradient()
    weights, signal = {}, {}
    for name in observation.parameters:
        square = float(observation.update[name].to(torch.float64).square().mean())
        signal[name] = max(0.0, 1.0 - deviation**2 / square) if square else 0.0
        weights[name] = torch.full_like(wanted[name], signal[name])
    if not any(signal.values()):
        weights = {name: torch.ones_like(wanted[name]) for name in observation.parameters}
    notes: dict[str, Any] = {
        "defense": "noise",
        "method": "weighted every tensor by its share of signal",
        "deviation": deviation * gradient_scale(observation),
        "signal": signal,
        "clipped": _clipped(hyper, energy, count, deviation),
    }
    target = {name: wanted[name] for name in observation.parameters}
    if notes["clipped"].startswith("no"):
        return Evidence(target=target, weights=weights, notes=notes)
    factor = shrinkage(observation, victim_of(observation), target)
    notes["factor"] = factor
    if factor is not None:
        target = {name: value * factor for name, value in target.items()}
    return Evidence(target=target, weights=weights, unknown_factor=factor is None, notes=notes)


def _clipped(hyper: NoiseHyper, energy: float, count: int, deviation: float) -> str:
    if hyper.clip is None:
        return "no: nothing was clipped"
    how = "a factor in (0, 1]"
    if hyper.kind == "laplace" and hyper.epsilon is not None:
        return f"unknown: clipped in the 1-norm, by {how}"
    fourth = 3.0 if hyper.kind == "gaussian" else 6.0
    square = energy - count * deviation**2
    doubt = 3.0 * (deviation**2 * math.sqrt((fourth - 1.0) * count) + 2.0 * deviation * hyper.clip)
    if square + doubt < hyper.clip**2 * (1.0 - 1e-5):
        return "no: the norm without the noise is below the bound"
    return f"possibly: the norm reaches the bound; by {how}"
