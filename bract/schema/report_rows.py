"""Define the rows of the report's tables: attacks, clients, rounds, images."""

from __future__ import annotations

from typing import Literal, Self

from bract.config.audit import Tier
from bract.schema.audit import (
    AuditResult,
    Baseline,
    Decibels,
    ImageResult,
    PrimaryScores,
    best_guess,
)
from bract.schema.metrics import BoostingRow, ClientRow
from bract.schema.reach import LeakCounts
from bract.schema.record import Number, Public, Record

Reason = Literal["ssim", "identified", "features", "correlation"]
"""The part of the rule by which an image leaked."""


PUBLIC_SETTINGS = frozenset(
    {
        *("chosen", "criterion", "dropout", "restart", "restarts", "images", "bn", "boxed"),
        *("history", "labels", "latent", "line_search", "lr", "max_unknowns", "momentum"),
        *("objective", "optimizer", "polish_steps", "pool", "schedule", "signed", "surrogate"),
        *("tolerance", "tv", "unknowns_rate", "unroll", "weighting", "width"),
    }
)
"""An attack's settings that a redacted report may hold: hyper-parameters, and what was chosen."""


class Spread(Record):
    """A mean, and its 95 % interval over clients; None without one."""

    mean: Public[Number] = None
    low: Public[Number] = None
    high: Public[Number] = None


class ScoreSpread(Spread):
    """The spread of a score, its best single value, and how many values are behind it.

    ``missing`` counts scored images that have no finite one, ``at_cap`` the PSNR that are exact
    copies: `EXACT_DB` represents any error that is too small to see.
    """

    best: Public[Number] = None
    missing: Public[int] = 0
    count: Public[int] = 0
    at_cap: Public[int] = 0


def _first(*scores: float | None) -> float | None:
    """Return the first score that is there; None where none is."""
    return next((score for score in scores if score is not None), None)


class SsimPsnr(PrimaryScores):
    """One SSIM and one PSNR, or what other inputs have in their place."""

    psnr: Public[Decibels] = None
    nrmse: Public[Number] = None


class Margins(Record):
    """How far images are above the best baseline of each, without the gradient."""

    ssim: Public[Spread]
    psnr: Public[Spread]


class ImageFacts(ImageResult):
    """One reconstructed image; picture paths are relative to the run directory.

    ``baseline`` is the best of the baselines without the gradient for this image. ``leaked`` is
    None where it was not scored, where that cannot be ``decided``, and where it is not ``judged``,
    since the upload is not what its description says.
    """

    baseline: Public[SsimPsnr] = SsimPsnr()
    leaked: Public[bool | None] = None
    leaked_by: Public[Reason | None] = None
    decided: Public[bool] = True
    judged: Public[bool] = True


class Finding(Record):
    """Why an attack got no further, and who could have measured it."""

    code: Public[str]
    text: Public[str]
    source: Public[Literal["attacker", "scorer"]]


RowKey = tuple[str, Tier, str]
"""An attack, its tier, and the input of the uploads: what one row of a table is about."""


class ObservationFacts(LeakCounts, AuditResult):
    """One attack on one observation: the audit's result, and what the rule and the report add.

    ``attack`` tells attacks on a round's aggregate, or on several ``rounds`` together, from those
    on single uploads.
    """

    attack_name: Public[str]
    method_name: Public[str]
    tried: Public[list[str]] = []
    images: Public[list[ImageFacts]] = []  # type: ignore[assignment]
    diagnosis: Public[list[Finding]] = []
    best_baseline: Public[SsimPsnr] = SsimPsnr()

    @property
    def row_key(self) -> RowKey:
        """The row of the attacks' table that it is part of."""
        return self.attack, self.tier, self.input

    def redact(self) -> Self:
        """Return a copy with the settings of `PUBLIC_SETTINGS` alone."""
        kept = {name: v for name, v in self.settings.items() if name in PUBLIC_SETTINGS}
        return super().redact().model_copy(update={"settings": kept})


class AttackRow(LeakCounts):
    """One attack of one tier over a client's observations of one input.

    ``client`` is None over all clients.

    ``methods`` counts what made the images where that goes by another name than the attack;
    ``chose``: whether the attack chose it among several, by its own loss, as a ``portfolio`` does.
    ``identified`` of the ``identifiable`` images are nearest to their own original among
    ``candidates`` (the fewest of any image). Scores are means over images; ``intervals`` holds
    those of the scores that are not spreads themselves. ``noun`` is what one example of the input
    is called, ``measure`` the score by which its reconstructions are compared.
    """

    attack: Public[str]
    attack_name: Public[str]
    tier: Public[Tier]
    input: Public[str] = "image"
    client: Public[str | None] = None
    chose: Public[bool] = False
    portfolio: Public[bool] = False
    methods: Public[dict[str, int]] = {}
    repeats: Public[int]
    uploads: Public[int]
    clients: Public[int]
    rounds: Public[list[int]]
    images: Public[int]
    failed: Public[int]
    identified: Public[int] = 0
    identifiable: Public[int] = 0
    candidates: Public[int | None] = None
    leaked_share: Public[Spread]
    ssim: Public[ScoreSpread]
    psnr: Public[ScoreSpread]
    features: Public[ScoreSpread]
    correlation: Public[ScoreSpread | None] = None
    nrmse: Public[Number] = None
    exact: Public[Number] = None
    noun: Public[str] = "image"
    measure: Public[str] = "SSIM"
    margin: Public[Margins]
    mse: Public[Number] = None
    lpips_alex: Public[Number] = None
    lpips_vgg: Public[Number] = None
    stlpips: Public[Number] = None
    identified_top1: Public[Number] = None
    identified_top5: Public[Number] = None
    label_accuracy: Public[Number] = None
    target_error: Public[Number] = None
    target_baseline: Public[Number] = None
    intervals: Public[dict[str, tuple[Number, Number]]] = {}
    oracle: Public[SsimPsnr]
    baselines: Public[dict[str, Baseline]] = {}
    gradient_cosine: Public[Number] = None
    seconds: Public[Number] = None
    iterations: Public[int | None] = None
    budget_seconds: Public[Number] = None
    restarts: Public[int | None] = None

    @property
    def row_key(self) -> RowKey:
        """Attack, tier and input: those of the observations that it is over."""
        return self.attack, self.tier, self.input

    @property
    def primary(self) -> ScoreSpread:
        """The spread of the input's primary score."""
        known = (self.ssim, self.features, self.correlation)
        there = (one for one in known if one is not None and one.mean is not None)
        return next(there, self.ssim)

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The baseline without the gradient with the highest primary score, and that score."""
        return best_guess(self.baselines)


class ClientFacts(Record):
    """One client: its training, its captures, and what the attack that is strongest on it got.

    Without a record of the training, rounds and examples are those of its captures. The ``best_*``
    are of its best image under ``strongest``, and ``worst_round`` is that attack's.
    """

    client: Public[str]
    rounds: Public[int] = 0
    examples: Public[int | None] = None
    seconds_per_round: Public[Number] = None
    encryption_seconds_per_round: Public[Number] = None
    clipped: Public[Number] = None
    train_loss: Public[Number] = None
    validation_accuracy: Public[Number] = None
    captures: Public[int] = 0
    attacked: Public[int] = 0
    refused: Public[int] = 0
    failures: Public[int] = 0
    strongest: Public[AttackRow | None] = None
    best_ssim: Public[Number] = None
    best_features: Public[Number] = None
    best_correlation: Public[Number] = None
    worst_round: Public[int | None] = None


class RoundFacts(Record):
    """One round of training; ``failures`` counts clients that did not answer."""

    round: Public[int]
    seconds: Public[Number] = None
    loss: Public[Number] = None
    accuracy: Public[Number] = None
    clients: Public[dict[str, ClientRow]] = {}
    failures: Public[int] = 0


class BoostingFacts(BoostingRow):
    """What FedBoosting measured in one round."""

    round: Public[int]


class LeakageRow(LeakCounts):
    """How much of one scored observation leaked."""

    attack: Public[str]
    attack_name: Public[str]
    tier: Public[Tier]
    round: Public[int]
    client: Public[str]
    ssim_mean: Public[Number] = None
    ssim_best: Public[Number] = None
    psnr_mean: Public[Number] = None
    psnr_at_cap: Public[int] = 0
    baseline_ssim: Public[Number] = None
    features_mean: Public[Number] = None
    features_best: Public[Number] = None
    baseline_features: Public[Number] = None
    correlation_mean: Public[Number] = None
    correlation_best: Public[Number] = None
    baseline_correlation: Public[Number] = None
    measure: Public[str] = "SSIM"
    input: Public[str] = "image"

    @property
    def row_key(self) -> RowKey:
        """Attack, tier and input: those of its observation."""
        return self.attack, self.tier, self.input

    @property
    def primary(self) -> float | None:
        """The mean of the input's primary score."""
        return _first(self.ssim_mean, self.features_mean, self.correlation_mean)

    @property
    def baseline(self) -> float | None:
        """The primary score of the best baseline without the gradient."""
        return _first(self.baseline_ssim, self.baseline_features, self.baseline_correlation)
