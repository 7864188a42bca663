"""Privacy spent by all updates of a site: Renyi differential privacy, composed and converted."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bract.client.defenses import DefenseChain
from bract.defenses.accountants import Spent, spent_by
from bract.defenses.entries import noise_index
from bract.defenses.noise import Noise
from bract.errors import BractError, shown

ORDERS: tuple[float, ...] = (
    *(1.0 + x / 10.0 for x in range(1, 100)),
    *map(float, range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
"""Orders alpha over which the conversion to epsilon is minimised; Opacus' own and larger ones."""

LEAST, MOST = 1e-30, 1e30
"""Noise multipliers that are accounted for: their squares, and sums of those, are finite."""


@dataclass(frozen=True)
class Mechanism:
    """The noise on one update.

    Attributes
    ----------
    kind
        ``gaussian`` in the 2-norm, ``laplace`` in the 1-norm; ``sampled`` is Gaussian noise on sums
        over Poisson samples of clipped per-example gradients, in each step of training.
    multiplier
        Standard deviation of Gaussian noise, or scale of Laplace noise, in units of the largest
        distance of two updates (2 ``clip``), of ``sampled`` in units of the largest gradient.
    rate, steps
        Of ``sampled``: with what probability a step draws an example, and steps of one update.
    accountant
        Of ``sampled``: Opacus' accountant, ``rdp`` or ``prv``.

    Raises
    ------
    BractError
        If the noise cannot be accounted for: a number is outside of its range, or no number.
    """

    kind: Literal["gaussian", "laplace", "sampled"]
    multiplier: float
    rate: float = 1.0
    steps: int = 1
    accountant: Literal["rdp", "prv"] = "rdp"

    def __post_init__(self) -> None:
        """Hold each number to its range, so that whatever is accounted for can be read again."""
        if not LEAST <= self.multiplier <= MOST:
            raise BractError(
                f"{self.kind} noise of {self.multiplier:g} times the largest distance cannot be "
                f"accounted for, expected {LEAST:g} to {MOST:g}; change its clip, std or epsilon",
                code="config-value",
            )
        if not (0.0 < self.rate <= 1.0 and 1 <= self.steps < 1 << 53):
            raise BractError(
                f"{self.steps} steps that draw an example with probability {self.rate:g} cannot "
                "be accounted for; change batch_size, local_steps or local_epochs",
                code="config-value",
            )

    def renyi(self, order: float) -> float:
        """Return a bound on the Renyi divergence of ``order`` > 1.

        Gaussian: order / (2 multiplier^2) (Mironov 2017), which also bounds the discrete
        Gaussian's. Laplace: that of randomised response at the same pure epsilon, the most that any
        purely private mechanism has (Kairouz, Oh and Viswanath 2015), on a grid or not. Sampled:
        Opacus' (Mironov, Talwar and Zhang 2019), of all its steps.
        """
        if self.kind == "gaussian":
            return order / (2.0 * self.multiplier**2)
        if self.kind == "sampled":
            from opacus.accountants.analysis.rdp import compute_rdp

            spent = compute_rdp(
                q=self.rate, noise_multiplier=self.multiplier, steps=self.steps, orders=[order]
            )
            return float(spent[0])
        epsilon = 1.0 / self.multiplier
        high, low = order * epsilon, (1.0 - order) * epsilon
        both = high + math.log1p(math.exp(low - high))
        return (both - epsilon - math.log1p(math.exp(-epsilon))) / (order - 1.0)

    def to_text(self) -> str:
        """Write it as ``kind:multiplier``, of ``sampled`` with the other fields behind."""
        text = f"{self.kind}:{self.multiplier!r}"
        if self.kind == "sampled":
            text += f":{self.rate!r}:{self.steps}:{self.accountant}"
        return text

    @classmethod
    def from_text(cls, text: str) -> Mechanism:
        """Read what `to_text` wrote.

        Raises
        ------
        ValueError
            If the text is no such mechanism.
        """
        kind, multiplier, *rest = text.split(":")
        wrong = ValueError(f"{shown(text)} is no mechanism")
        try:
            if kind == "sampled":
                rate, steps, accountant = rest
                if accountant not in ("rdp", "prv"):
                    raise wrong
                prv = accountant == "prv"
                numbers = float(multiplier), float(rate), int(steps)
                return cls("sampled", *numbers, "prv" if prv else "rdp")
            if kind not in ("gaussian", "laplace") or rest:
                raise wrong
            return cls("gaussian" if kind == "gaussian" else "laplace", float(multiplier))
        except BractError as error:
            raise wrong from error


def mechanism_of(chain: DefenseChain) -> Mechanism | None:
    """Return the noise of a chain; None where it gives no guarantee.

    Laplace noise given by ``std`` has none: its update is clipped in the 2-norm. A chain has none
    either where `noise_index` finds none.
    """
    at = noise_index(chain.defenses)
    noise = None if at is None else chain.defenses[at]
    if not isinstance(noise, Noise) or noise.clip is None:
        return None
    if noise.kind == "laplace":
        return None if noise.epsilon is None else Mechanism("laplace", 1.0 / noise.epsilon)
    return Mechanism("gaussian", noise.deviation / (2.0 * noise.clip))


def total_epsilon(counts: Mapping[Mechanism, int], delta: float) -> float:
    """Return epsilon of all updates together at ``delta``; see `account`."""
    return account(counts, delta).epsilon


def account(counts: Mapping[Mechanism, int], delta: float) -> Spent:
    """Return epsilon of all updates together at ``delta``, and how it was found.

    Renyi bounds add up; they are converted by proposition 12 of Canonne, Kamath and Steinke
    (2020), as Opacus does. Where all noise is Gaussian and Opacus is installed, its accountant
    computes the same, or its PRV accountant where every update was made for that. The sum of pure
    epsilons is taken where it is smaller (Laplace noise alone).

    Parameters
    ----------
    counts
        How many updates left under each mechanism.

    Returns
    -------
    Spent
        Its epsilon is never NaN: where arithmetic gives no bound, it is infinite.
    """
    held = {mechanism: count for mechanism, count in counts.items() if count > 0}
    if not held:
        return Spent(0.0)
    if all(m.kind != "laplace" for m in held) and importlib.util.find_spec("opacus") is not None:
        numerical = all(m.accountant == "prv" for m in held)
        # A whole update sees all of its images: no subsampling amplifies.
        uses = [(m.multiplier, m.rate, m.steps * count) for m, count in held.items()]
        return spent_by(uses, delta, "prv" if numerical else "rdp")
    candidates = [
        sum(count * m.renyi(a) for m, count in held.items())
        + math.log1p(-1.0 / a)
        - (math.log(delta) + math.log(a)) / (a - 1.0)
        for a in ORDERS
    ]
    if all(m.kind == "laplace" for m in held):
        candidates.append(sum(count / m.multiplier for m, count in held.items()))
    known = [found for found in candidates if not math.isnan(found)]
    return Spent(max(0.0, min(known, default=math.inf)))
