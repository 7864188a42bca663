"""From an observation to what an attack tries to match.

An oblivious attacker takes the captured tensors as they are. An adaptive one undoes, simulates or
discounts it first; each such method registers in `ADAPTIVE` under the defense's name and returns
the same `Evidence`, so every attack runs on it unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bract.attacks.problem.client_model import ForwardModel
from bract.attacks.problem.likelihoods import Likelihood
from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.config.audit import TIERS, Tier
from bract.defenses import DEFENSES
from bract.errors import BractError
from bract.registry import Registry
from bract.updates.update import Tensors


class Fitting(Protocol):
    """Fit images to an evidence, on the engine's device and within its budget."""

    @property
    def device(self) -> torch.device:
        """Device to compute on."""

    @property
    def over(self) -> bool:
        """Return whether the budget's time is spent."""

    def check(self) -> None:
        """Raise a `BractError` once the whole budget has been over for some seconds.

        For a stage without which nothing can be matched, which no budget ends otherwise.
        """

    def __call__(self, evidence: Evidence, labels: Sequence[int], steps: int) -> Tensors:
        """Return the gradient of images that are fitted to the evidence.

        float64 on `device`, by the names of the target, scaled like `Observation.gradient`. At
        most ``steps`` steps are taken, fewer where the budget ends.
        """

    def images(
        self, evidence: Evidence, labels: Sequence[int], steps: int, *, start: int = 0
    ) -> Tensor:
        """Return the images ``(1, B, C, H, W)`` instead; later starts are further from grey."""

    def descend(
        self, evidence: Evidence, labels: Sequence[int], images: Tensor | None, steps: int
    ) -> tuple[Tensor, Tensors]:
        """Fit by L-BFGS from ``images``, or from grey; return them and their gradient, as above."""

    def sharpen(
        self, evidence: Evidence, labels: Sequence[int], images: Tensor, steps: int
    ) -> tuple[Tensor, Tensors] | None:
        """Fit by second order from ``images``; return them and their gradient, as above.

        None where that is no use or too dear: on a model with kinks, or with too many pixels.
        """


class Refinement(Protocol):
    """Refine an evidence by further computation, one stage after another.

    `bract.attacks.solve.engine.Engine.refine` runs the stages on its device, within the budget, and
    keeps the evidence after each of them in its checkpoint. All that a stage needs of earlier ones
    is in the evidence.
    """

    @property
    def stages(self) -> int:
        """Most stages that there are."""

    def __call__(self, evidence: Evidence, fit: Fitting) -> Evidence:
        """Return the evidence after one more stage; its ``refine`` is None after the last one."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The target that an attack matches, and its trust in each coordinate.

    Attributes
    ----------
    target
        Scaled like `Observation.gradient`; may cover some of the parameters only.
    weights
        Trust in each coordinate, same names and shapes; names left out count fully. Only their
        proportions matter: `bract.attacks.problem.case.open_case` scales them so that two
        images stay as far apart as they are undefended. Weights of tensors that are no parameters
        stay.
    errors
        Bounds on the error of each coordinate, same names and shapes, for attacks that solve
        linear equations and weigh each by itself; infinite where nothing is known.
    alternatives
        Other readings that a coordinate allows, ``(K, ...)`` for the names of ``target``: what is
        simulated is compared with the nearest one.
    nuisance
        Directions along which the target is not known, ``(R, ...)`` for the names of ``target``,
        orthonormal over all of them: differences along them do not count.
    bounds
        How far the true value of a coordinate may be from the target, on either side, not negative,
        same names and shapes; names left out are exact. What is simulated is compared with the
        nearest value that the bounds allow.
    unknown_factor
        Whether the target is the true one divided by an unknown factor of at least 1; the best
        factor is found for whatever is simulated.
    likelihood
        ``-log p(target | what is simulated)`` in nats, for a defense that adds noise, or None.
        Descents minimise it plus ``-log p(images)`` in place of their own objective and priors
        (`bract.attacks.solve.matching.minimise`).
    forward
        How to simulate the client; None leaves the choice to the protocol.
    adapt
        Makes of the forward model that the protocol asks for, and of the number of images, one
        that knows the defense.
    buffers
        What the attacker worked out of the model's inside, by the names of its buffers, for
        example the noise of a bottleneck; the forward model finds it among the captured buffers.
    labels
        Labels known with certainty, int64 ``(B,)``, or None; attacks do not search for them then.
    notes
        What was decided and why, JSON-ready; becomes part of the reconstruction's settings.
    refine
        Further stages that improve it, or None. While ``target`` is empty, the first stage must
        run before anything can be matched.
    explain
        Makes further notes of ``buffers`` and the unknowns that the chosen trial found, by name,
        and of its residual (see `bract.attacks.result.Trial`); or None.
    """

    target: Tensors
    weights: Tensors | None = None
    errors: Tensors | None = None
    alternatives: Tensors | None = None
    nuisance: Tensors | None = None
    bounds: Tensors | None = None
    unknown_factor: bool = False
    likelihood: Likelihood | None = None
    forward: ForwardModel | None = None
    adapt: Callable[[ForwardModel, int], ForwardModel] | None = None
    buffers: Tensors = field(default_factory=dict)
    labels: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    refine: Refinement | None = None
    explain: Callable[[Tensors, float], dict[str, Any]] | None = None

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of noise in every coordinate; None where none is known."""
        found = getattr(self.likelihood, "deviation", None)
        return float(found) if found else None

    @property
    def noisy(self) -> bool:
        """Return whether there is noise of more than `ROUNDING` of the root mean square."""
        if self.likelihood is None:
            return False
        energy = sum(float(value.double().square().sum()) for value in self.target.values())
        count = sum(value.numel() for value in self.target.values())
        deviation = math.inf if self.deviation is None else self.deviation
        return bool(deviation**2 * count > ROUNDING**2 * energy)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What an adversary knows besides one observation, and how far it may search secrets.

    Attributes
    ----------
    history
        Earlier observations of the same client, by round.
    earlier
        The client's gradients in the first rounds of ``history``, as reconstructed images make
        them, by name, scaled like `Observation.gradient`; empty where none was reconstructed.
    weak_seeds
        Seeds that are tried where a defense may have drawn its secrets from one.
    needs
        Names of the parameters whose gradients the attack reads; None for all. An attacker to whom
        each coordinate costs time may leave the others out of its target.
    """

    history: Sequence[Observation] = ()
    earlier: Sequence[Tensors] = ()
    weak_seeds: SeedBudget = field(default_factory=SeedBudget)
    needs: frozenset[str] | None = None


AdaptiveView = Callable[[Observation, Known], Evidence]

ROUNDING = 1e-6
"""Noise, as a share of the update's root mean square, that counts as rounding of its numbers."""

ADAPTIVE: Registry[AdaptiveView] = Registry(
    "adaptive attacker for the defense",
    group="bract.attackers",
    check=lambda _, entry: None if callable(entry) else f"{entry!r} is no function; name one",
    beside=DEFENSES,
)

FORWARD: Registry[AdaptiveView] = Registry("simulation of the defense", beside=ADAPTIVE)
"""How to compare uploads as they were sent with what a defense would make of a candidate, by its
name; for attacks that need no gradient through the defense."""

CHAINS: Registry[AdaptiveView] = Registry("adaptive attacker for the chain", beside=ADAPTIVE)
"""Adaptive attackers of several defenses, by their names in order: ``pruning then noise``."""


def has_attacker(defenses: Sequence[str]) -> bool:
    """Return whether an adaptive attacker reads updates of these defenses, by their names in
    order.
    """
    known = CHAINS if len(defenses) > 1 else ADAPTIVE
    return not defenses or " then ".join(defenses) in known


def frozen(observation: Observation) -> list[str]:
    """Return the names of frozen parameters, which third-party apps send along.

    Their update is zero. A gradient that is zero in a whole tensor tells as little.
    """
    return [n for n in observation.parameters if not bool(observation.update[n].any())]


def _trained(observation: Observation, target: Tensors) -> Tensors:
    """Leave out frozen parameters.

    Models of texts keep theirs, since of an adapter's first factor it says why nothing is read.
    """
    if observation.declaration.text is not None:
        return target
    left_out = frozen(observation)
    return {name: value for name, value in target.items() if name not in left_out} or target


def read_evidence(
    observation: Observation, tier: Tier = "oblivious", known: Known | None = None
) -> Evidence:
    """Return what an adversary of this tier reads in an observation, before any refinement.

    The surrogate tier reads as the adaptive one does: what it knows besides is no part of an
    observation.
    """
    if tier not in TIERS:
        raise BractError(
            f"unknown tier {tier!r}; expected one of {', '.join(TIERS)}", code="unknown-name"
        )
    defenses = [str(d.get("name", "?")) for d in observation.declaration.defenses]
    if tier == "oblivious" or not defenses:
        wanted = observation.gradient()
        target = {name: wanted[name] for name in observation.parameters}
        return Evidence(target=target if defenses else _trained(observation, target))
    for name in defenses:
        if name not in ADAPTIVE:
            raise ADAPTIVE.missing(name)
    if len(defenses) == 1:
        return ADAPTIVE[defenses[0]](observation, known or Known())
    chain = " then ".join(defenses)
    if chain not in CHAINS:
        raise BractError(
            f"{observation.key}: no adaptive attacker knows {chain}; known chains are "
            f"{', '.join(CHAINS)}",
            code="attack-unsuited",
        )
    return CHAINS[chain](observation, known or Known())
