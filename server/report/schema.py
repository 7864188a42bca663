"""The files of a run directory that the report reads, as records; unknown keys are let through."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

RUN_SCHEMA = 1
AUDIT_SCHEMA = 1
EXACT_DB = 100.0

Tier = Literal["oblivious", "adaptive", "colluding"]
TIERS: tuple[Tier, ...] = ("oblivious", "adaptive", "colluding")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _decibels(value: object) -> object:
    if isinstance(value, float) and value > EXACT_DB:
        return EXACT_DB
    return _finite(value)


Number = Annotated[float | None, BeforeValidator(_finite)]
Decibels = Annotated[float | None, BeforeValidator(_decibels)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RunFile(_Record):
    """``run.json``: what ran, when, with which versions, and how it ended.

    ``started`` and ``finished`` are seconds since the epoch or ISO 8601 text.
    """

    name: str | None = None
    status: str = "unknown"
    started: float | str | None = None
    finished: float | str | None = None
    device: str | None = None
    command: str | list[str] | None = None
    flower_run_id: int | str | None = None
    bract: str | None = None
    flwr: str | None = None
    torch: str | None = None
    python: str | None = None


class GlobalRow(_Record):
    """Loss and accuracy (in [0, 1]) of the global model on the test data."""

    loss: Number = None
    accuracy: Number = None


class ClientRow(_Record):
    """What one client reported in one round; ``clipped`` counts values that encryption cut."""

    train_loss: Number = None
    num_examples: int | None = None
    local_steps: int | None = None
    seconds: Number = None
    defense_seconds: Number = None
    validation_accuracy: Number = None
    random_key_accuracy: Number = None
    clipped: Number = None
    encrypt_seconds: Number = None
    decrypt_seconds: Number = None


class Failure(_Record):
    """A client that did not answer, and why."""

    client: str = "unknown client"
    reason: str = "no reason recorded"


class BoostingRow(_Record):
    """What FedBoosting measured in one round; every list is in the order of ``clients``.

    ``V[i][j]`` is the score of client i's fused model on client j's validation split, a column of
    None where client j did not answer usably. ``T`` holds the training scores.
    """

    clients: list[str]
    V: list[list[Number]]
    T: list[Number]
    weights: list[float]
    signal: str = "accuracy"

    @model_validator(mode="after")
    def _square(self) -> BoostingRow:
        count = len(self.clients)
        if {len(self.V), len(self.T), len(self.weights), *map(len, self.V)} - {count}:
            raise ValueError(f"V, T and weights do not fit {count} clients")
        return self


class MetricsRow(_Record):
    """One line of ``metrics.jsonl``; round 0 is the model before training."""

    round: int
    seconds: Number = None
    time: Number = None
    evaluation: GlobalRow | None = Field(default=None, validation_alias="global")
    clients: dict[str, ClientRow] = {}
    failures: list[Failure] = []
    boosting: BoostingRow | None = None


class Scores(_Record):
    """How near a reconstruction is to its original; PSNR is capped at `EXACT_DB` decibels."""

    mse: Number = None
    psnr: Decibels = None
    ssim: Number = None
    lpips_alex: Number = None
    lpips_vgg: Number = None
    stlpips: Number = None
    identified_top1: bool | None = None
    identified_top5: bool | None = None


class Baseline(_Record):
    """Scores of a guess made without the gradient."""

    mse: Number = None
    psnr: Decibels = None
    ssim: Number = None


class ImageResult(_Record):
    """One reconstructed image; file names are relative to the attack's folder.

    ``baselines`` are the scores of guesses made without the gradient for this very image.
    """

    index: int
    label: int | None = None
    label_confidence: Number = None
    true_label: int | None = None
    reconstruction: str | None = None
    original: str | None = None
    scores: Scores | None = None
    oracle: Scores | None = None
    baselines: dict[str, Baseline] = {}


class Budget(_Record):
    """What the attacker was allowed to spend on one observation."""

    iterations: int | None = None
    seconds: Number = None
    restarts: int | None = None


class Declared(_Record):
    """A number that the protocol declares beside the one that the attack worked with."""

    declared: int | None = None
    searched: int | None = None
    simulated: int | None = None


class LayerMatch(_Record):
    """How one tensor was matched; ``size`` is its root mean square, the largest tensor's is 1."""

    cosine: Number = None
    size: Number = None


class TruthCheck(_Record):
    """The client's computation repeated on its true images (`server.truth_check`)."""

    cosine: Number = None
    scale: Number = None
    exact: bool = False
    tried: dict[str, Number] = {}


class Signals(_Record):
    """What was measured about one attack on one observation (`attacks.diagnosis.signals`)."""

    scale: Number = None
    layers: dict[str, LayerMatch] = {}
    zero: Number = None
    dead: Number = None
    negative: int | None = None
    unbalanced: Number = None
    unsure: Number = None
    images: Declared = Declared()
    steps: Declared = Declared()
    optimizer: str | None = None
    norm: Number = None
    norm_ratio: Number = None
    falling: Number = None
    truth_check: TruthCheck | None = None


class AuditFile(_Record):
    """``audit/<attack>/round-R--CLIENT.json``: one attack on one observation.

    ``members`` are the clients whose mean update it is, empty for a single client's. ``method`` is
    the attack that made the images, where ``attack`` chose among several; repeats of an attack
    with other seeds count from 0. ``read_as`` is the tier whose reading of the update was attacked:
    the colluding tier reads an aggregate obliviously.
    """

    round: int
    client: str
    attack: str
    members: list[str] = []
    method: str | None = None
    repeat: int = 0
    tier: Tier = "oblivious"
    read_as: Tier | None = None
    defenses: list[dict[str, Any] | str] = []
    encryption: str = "none"
    settings: dict[str, Any] = {}
    budget: Budget = Budget()
    seed: int | None = None
    device: str | None = None
    seconds: Number = None
    loss_curve: list[tuple[float, Number]] = []
    gradient_cosine: Number = None
    gradient_residual: Number = None
    diagnosis: Signals | None = None
    refused: str | None = None
    failed: bool = False
    scored: bool = False
    selection: str = "blind"
    images: list[ImageResult] = []
    label_accuracy: Number = None
    candidates: int | None = None
    baselines: dict[str, Baseline] = {}
    notes: list[str] = []


class CaptureFile(_Record):
    """``observation.json``: what the protocol declared, and which tensors the server holds."""

    round: int
    client: str
    protocol: dict[str, Any] = {}
    tensors: dict[str, list[str]] = Field(
        default={}, validation_alias=AliasChoices("order", "tensors")
    )
