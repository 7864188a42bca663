"""Budget and result of an attack."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bract.errors import BractError
from bract.parse.strict_json import json_ready
from bract.schema.audit import AttackRecord, Certificate, TrialSummary
from bract.updates.update import Tensors


@dataclass(frozen=True, kw_only=True)
class SeedBudget:
    """How many seeds a search tries for one observation; 0 tries none.

    Attributes
    ----------
    candidates
        Most seeds. Small numbers come first, dates and numbers made of round and client, then what
        is left up to 2^32. Where the noise is small relative to the update a seed costs more, and
        fewer are tried.
    seconds
        Wall time; what is found then depends on the machine.
    seeds
        Seeds to try instead, where something is known about them.
    """

    candidates: int = 1 << 18
    seconds: float | None = None
    seeds: tuple[range, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Iterations, seconds, restarts and seeds that an attack may spend on one observation.

    Attributes
    ----------
    iterations
        Optimisation steps of each restart; None leaves the attack's own default, or no limit
        where ``seconds`` is given.
    restarts
        Independent starts; the one with the lowest loss of the attacker is the blind pick.
    seconds
        Wall time for all restarts of one observation together. Results then depend on the
        machine; a budget in iterations is reproducible.
    max_images
        Most images that are reconstructed from one observation. An update of more examples is
        explained with this many.
    chosen_restarts
        Numbers of the restarts to run, each of which begins at its own random point; None takes
        ``0`` to ``restarts - 1``.
    weak_seeds
        Seeds of torch's CPU generator that an adaptive attacker tries, before the restarts.
    """

    iterations: int | None = None
    restarts: int = 1
    seconds: float | None = None
    max_images: int = 8
    chosen_restarts: tuple[int, ...] | None = None
    weak_seeds: SeedBudget = field(default_factory=SeedBudget)

    def __post_init__(self) -> None:
        for name, value in (
            ("iterations", self.iterations),
            ("restarts", self.restarts),
            ("seconds", self.seconds),
            ("max_images", self.max_images),
        ):
            if value is not None and not value > 0:
                raise BractError(
                    f"budget.{name} is {value!r}; expected a positive number", code="config-value"
                )
        if self.chosen_restarts is not None and not self.chosen_restarts:
            raise BractError(
                "budget.chosen_restarts is empty; expected numbers of restarts, or None",
                code="config-value",
            )

    @property
    def restart_numbers(self) -> tuple[int, ...]:
        """Numbers of the restarts that run."""
        return tuple(range(self.restarts)) if self.chosen_restarts is None else self.chosen_restarts


@dataclass(frozen=True)
class Determined:
    """The certificate of a reading: how far an update determines what entered, without the truth.

    Attributes
    ----------
    equations
        Independent numbers that are known of what entered.
    residual
        What the reading leaves of the gradient that it explains, at least 0.
    rounding
        Most of that which rounding may leave.
    """

    equations: int
    residual: float
    rounding: float

    @property
    def sure(self) -> bool:
        """Return whether rounding accounts for all that is left."""
        return self.residual <= self.rounding

    @property
    def order(self) -> tuple[bool, int]:
        """Return what is larger of the better of two readings of one update."""
        return self.sure, self.equations


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One restart of an attack on one observation: its best iterate, by the attack's own loss.

    All tensors are on the CPU.

    Attributes
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1].
    label_probabilities
        float32 ``(B, classes)``, rows sum to 1; row b belongs to image b.
    loss
        The attack's loss of exactly these images; infinite where no iterate was finite.
    restart
        Number of the restart; the same number begins at the same point whatever the budget.
    attack
        Registered name of the attack that made it.
    method
        What that attack came down to on this observation; its own name where it does one thing.
    components
        Parts of the method that made these images, for example ``("cosine matching", "pixels",
        "labels analytic")``.
    unknowns
        Values found in addition to images and labels, by name, for example gamma and beta of a
        locked layer.
    cosine, residual
        Cosine in [-1, 1] between the matched tensors and those that ``images`` produce, and the
        norm of their difference over the norm of the matched tensors: 0 is a perfect match.
    layers
        Cosine between target and simulation by the tensor's name, each coordinate alike; of the
        last one where several rounds were matched together.
    scale
        Factor from what ``images`` produce to the target along it, by the evidence's weights and in
        the same round; None where one of them is zero.
    nats
        ``-log p(evidence | images, labels) - log p(images)`` up to a constant of the observation,
        where the evidence has a likelihood (random defenses, to an attacker that knows them); the
        prior is `bract.attacks.solve.regularizers.NaturalImages` whatever the attack's own. None
        elsewhere.
    statistics
        Relative error of the batch statistics of ``images``, where the capture holds enough of
        those of the client's own batch (`bract.attacks.solve.own_statistics`); None elsewhere.
    certainty
        The attacker's own trust in each part of an example, ``(B, parts)`` in [0, 1]; None where
        the method has none.
    certificate
        Proof that ``images`` are right, without the truth (`bract.attacks.problem.certificate`);
        None where there is none.
    determined
        Certificate of the reading of a layer that ``images`` were found from; None where nothing
        was read.
    loss_curve
        ``(iteration, best loss so far)``, at most about 200 points.
    iterations
        Steps that were taken.
    seconds
        Wall time: this trial's share of its batch.
    unroll
        Most local steps that the attack simulates one by one.
    settings
        Hyper-parameters of the attack and what it decided by itself, JSON-ready.
    pass_number
        Pass of `bract.attacks.Auto` that ran it, from 1; 0 elsewhere.
    """

    images: Tensor
    label_probabilities: Tensor
    loss: float
    restart: int = 0
    attack: str = ""
    method: str = ""
    components: tuple[str, ...] = ()
    unknowns: Tensors = field(default_factory=dict)
    cosine: float | None = None
    residual: float | None = None
    layers: dict[str, float] = field(default_factory=dict)
    scale: float | None = None
    nats: float | None = None
    statistics: float | None = None
    certainty: Tensor | None = None
    certificate: Certificate | None = None
    determined: Determined | None = None
    loss_curve: list[tuple[int, float]] = field(default_factory=list)
    iterations: int = 0
    seconds: float = 0.0
    unroll: int = 16
    settings: dict[str, Any] = field(default_factory=dict)
    pass_number: int = 0

    @property
    def failed(self) -> bool:
        """Return whether no iterate had a finite loss."""
        return not math.isfinite(self.loss)

    @property
    def distance(self) -> float:
        """One minus the cosine of the match, in [0, 2]; infinite for a failed trial."""
        if self.failed or self.cosine is None or not math.isfinite(self.cosine):
            return math.inf
        return 1.0 - self.cosine

    def record(self) -> TrialSummary:
        """Return the attacker's figures; numbers that are not finite become None."""
        return TrialSummary(
            attack=self.attack,
            method=self.method,
            components=list(self.components),
            restart=self.restart,
            pass_number=self.pass_number,
            iterations=self.iterations,
            distance=self.distance,
            nats=self.nats,
            statistics=self.statistics,
            loss=self.loss,
            seconds=self.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Result of one attack on one observation.

    Attributes
    ----------
    attack, observation, tier, seed
        Name of the attack that was asked for, key of the observation, what the adversary knew,
        and the seed.
    trials
        Every trial, at least one; the *oracle* pick chooses among these with the truth in hand, and
        is reported with the blind pick, never instead.
    chosen
        Index of the *blind* pick in ``trials``, chosen without the truth. The properties below
        describe this trial.
    seconds
        Wall time of this observation's share of the work, the reading of its evidence included.
    not_applicable
        Attacks that were tried and cannot be used on this observation, and why.
    settings
        Hyper-parameters and what the attack decided by itself, JSON-ready.
    """

    attack: str
    observation: str
    tier: str
    seed: int
    trials: tuple[Trial, ...]
    chosen: int = 0
    seconds: float = 0.0
    not_applicable: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def pick(self) -> Trial:
        """The blind pick."""
        return self.trials[self.chosen]

    @property
    def method(self) -> str:
        """The concrete method that made the images, whatever was asked for."""
        return self.pick.method or self.pick.attack or self.attack

    @property
    def components(self) -> tuple[str, ...]:
        """Parts of the method that made the images."""
        return self.pick.components

    @property
    def images(self) -> Tensor:
        """float32 ``(B, C, H, W)`` in [0, 1]."""
        return self.pick.images

    @property
    def label_probabilities(self) -> Tensor:
        """float32 ``(B, classes)``, rows sum to 1; row b belongs to image b."""
        return self.pick.label_probabilities

    @property
    def labels(self) -> Tensor:
        """The likeliest label of each image, int64 ``(B,)``."""
        return self.label_probabilities.argmax(dim=1)

    @property
    def targets(self) -> Tensor:
        """The likeliest label of each example, or the number that the model predicts, ``(B,)``."""
        found = self.label_probabilities
        return found[:, 0] if found.shape[1] == 1 else self.labels

    @property
    def unknowns(self) -> Tensors:
        """Variables found in addition to images and labels, by name."""
        return self.pick.unknowns

    @property
    def final_loss(self) -> float:
        """The attack's loss of ``images``; infinite where every trial failed."""
        return self.pick.loss

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        """``(iteration, best loss so far)``, at most about 200 points."""
        return self.pick.loss_curve

    @property
    def iterations(self) -> int:
        """Steps that were taken."""
        return self.pick.iterations

    @property
    def gradient_cosine(self) -> float | None:
        """Cosine between the matched tensors and those that ``images`` produce, in [-1, 1]."""
        return self.pick.cosine

    @property
    def gradient_residual(self) -> float | None:
        """Norm of their difference over the norm of the matched tensors."""
        return self.pick.residual

    @property
    def certificate(self) -> Certificate | None:
        """Proof that ``images`` are right, without the truth; None where there is none."""
        return self.pick.certificate

    @property
    def failed(self) -> bool:
        """Return whether no trial ever had a finite loss. A failed trial stays in every mean."""
        return self.pick.failed

    def record(self) -> AttackRecord:
        """Return everything but the tensors, as it is written; see `bract.schema.AuditResult`."""
        return AttackRecord(
            chosen_attack=self.pick.attack or self.attack,
            method=self.method,
            components=list(self.components),
            unknowns={name: list(value.shape) for name, value in self.unknowns.items()},
            trials=[trial.record() for trial in self.trials],
            chosen=self.chosen,
            not_applicable=self.not_applicable,
            settings=json_ready(self.settings),
            seed=self.seed,
            seconds=self.seconds,
            iterations=self.iterations,
            final_loss=self.final_loss,
            loss_curve=self.loss_curve,
            gradient_cosine=self.gradient_cosine,
            gradient_residual=self.gradient_residual,
            certificate=self.certificate,
            failed=self.failed,
        )


class CutOffError(BaseException):
    """An attack went on when its time was over; on its way up it gathers what was found.

    No `Exception`, which an attack that tries several methods would take for one that failed.

    Attributes
    ----------
    trials
        Trials of the cases that were running, by the case's number: what the engine holds.
    found
        Reconstructions of observations, as far as anything was found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trials: dict[int, list[Trial]] = {}
        self.found: list[Reconstruction] = []


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An observation that an attack could not use.

    Attributes
    ----------
    attack, observation
        Their names.
    reason, code
        Message and code of the error (`bract.errors.codes`); by its reason a row is refused, so one
        that is empty is said to be missing.
    """

    attack: str
    observation: str
    reason: str
    code: str = "attack-unsuited"

    def __post_init__(self) -> None:
        if not self.reason:
            object.__setattr__(self, "reason", f"{self.attack} gave no reason")
