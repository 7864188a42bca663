"""Against AdaDefense with secret first updates: match what it sends on average over the secrets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.adaptive.simulated_defense import Simulated, defended_by
from bract.captures.observation import Observation
from bract.defenses import AdaDefense
from bract.errors import BractError
from bract.updates.update import Tensors

KEYS = 32
"""Secrets that a candidate's upload is averaged over, and as many of the opposite sign."""

_TOGETHER = 16
"""Secrets at a time: so many times the model's size is in memory."""


@dataclass(frozen=True)
class ExpectedUpload:
    """Mean of what AdaDefense sends of an update, over the client's secret updates, without alpha.

    A secret update has as many independent standard normal coordinates times the root mean square
    of the tensor of the client's first update. So, in every coordinate, the first moment starts at
    that times a number M and the second at its square times V, whose joint law is known. M and V
    are drawn here as a client draws them, the same for all coordinates: the mean is a function of
    a coordinate over its tensor's root mean square.

    Attributes
    ----------
    rounds
        Updates of the client so far, with the one that is simulated; taken to be all alike, which
        is exact for the first.
    scale
        Factor from an update to what is simulated.
    """

    hyper: AdaDefense
    rounds: int
    scale: float

    def __call__(self, sent: Tensors) -> Tensors:
        """Return the mean uploads of updates ``(L, ...)`` by name, differentiably."""
        m, v = self._starts()
        return {name: self._mean(value / self.scale, m, v) for name, value in sent.items()}

    def _starts(self) -> tuple[Tensor, Tensor]:
        hyper, count = self.hyper, self.hyper.secret_updates
        draw = torch.Generator().manual_seed(0)
        secret = torch.randn(KEYS, count, generator=draw, dtype=torch.float64)
        ago = torch.arange(count - 1, -1, -1, dtype=torch.float64)
        m = (secret * (1.0 - hyper.beta1) * hyper.beta1**ago).sum(dim=1)
        v = (secret.square() * self._gain * self._keep**ago).sum(dim=1)
        return torch.cat([m, -m]), torch.cat([v, v])

    @property
    def _gain(self) -> float:
        return 1.0 if self.hyper.variant == "adagrad" else 1.0 - self.hyper.beta2

    @property
    def _keep(self) -> float:
        return 1.0 if self.hyper.variant == "adagrad" else self.hyper.beta2

    def _mean(self, g: Tensor, starts: Tensor, squares: Tensor) -> Tensor:
        hyper, rounds = self.hyper, self.rounds
        over = tuple(range(1, g.dim()))
        square = g.square()
        size2 = (square.mean(dim=over, keepdim=True) if over else square).clamp_min(1e-38)
        size = size2.sqrt()
        kept1, kept2 = hyper.beta1**rounds, self._keep**rounds
        new = float(rounds) if hyper.variant == "adagrad" else 1.0 - kept2
        first, second = self._corrections()
        inside = hyper.epsilon if hyper.eps_placement == "inside" else 0.0
        outside = hyper.epsilon if hyper.eps_placement == "outside" else 0.0
        if hyper.eps_placement == "uncorrected":
            outside = hyper.epsilon * second**-0.5
        total = torch.zeros_like(g)
        # A leading dimension for the secrets.
        each = (-1, *[1] * g.dim())
        for start in range(0, len(starts), _TOGETHER):
            m = starts[start : start + _TOGETHER].to(g).view(each)
            v = squares[start : start + _TOGETHER].to(g).view(each)
            above = kept1 * m * size + (1.0 - kept1) * g
            under = (kept2 * v * size2 + new * square) / second + inside
            total = total + (above / (under.clamp_min(1e-38).sqrt() + outside)).sum(dim=0)
        return total / (first * len(starts))

    def _corrections(self) -> tuple[float, float]:
        hyper, number = self.hyper, self.hyper.secret_updates + self.rounds
        if not hyper.bias_correction:
            return 1.0, 1.0
        return 1.0 - hyper.beta1**number, 1.0 - hyper.beta2**number


def expected(observation: Observation, hyper: AdaDefense, rounds: int) -> Simulated:
    """Return an upload of AdaDefense with secret updates, and its mean as the simulation.

    The squared difference from what was sent is smallest, in the mean over secrets, at the
    client's own update. Nothing else of the upload's law is used, and an upload of a later round
    is read by itself: an attacker who uses more may find more (`experiments.secret_moments`).

    Parameters
    ----------
    rounds
        As `ExpectedUpload` has them.

    Raises
    ------
    BractError
        For the variant ``yogi``, whose second moment has no such form.
    """
    if hyper.variant == "yogi":
        raise BractError(
            f"{observation.key}: no adaptive attacker knows adadefense variant 'yogi' with "
            "secret_updates; take the variant adam or adagrad",
            code="attack-unsuited",
        )
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    return Simulated(
        target={name: observation.update[name] / alpha for name in observation.parameters},
        unit=1.0 / alpha,
        adapt=defended_by(ExpectedUpload(hyper, rounds, observation.law.to_gradient)),
        notes={
            "defense": "adadefense",
            "method": "matched the mean upload over the client's secret updates",
            "captured_rounds_of_client": rounds,
        },
    )
