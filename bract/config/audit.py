"""The audit: which questions, attacks and observations, with what budget; and its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from bract.config.sections import Fraction
from bract.config.work import Positive, Section

Tier = Literal["oblivious", "adaptive", "surrogate", "colluding"]
"""What an adversary knows."""

TIERS: tuple[Tier, ...] = ("oblivious", "adaptive", "surrogate", "colluding")


class LeakConfig(Section):
    """From when on a reconstruction counts as a leaked image.

    ``1 - level`` is the rate of false alarms: of runs whose reconstructions saw no gradient, at
    most this share names any image as leaked.
    """

    ssim: Fraction = 0.5
    psnr_margin: Annotated[float, Field(ge=0.0)] = 3.0
    level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    features_margin: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2


class AuditConfig(Section):
    """Which questions are asked of the captures, by which attacks, with what budget.

    Attributes
    ----------
    questions
        Names of `bract.audit.questions.QUESTIONS`; None asks all that the captures and what
        consenting clients kept allow.
    attacks
        Registered names; ``auto`` chooses among several for each observation, blind.
    tier
        What the attacker knows; ``all`` is every tier that applies to the run.
    rounds, clients
        None takes every one that was captured.
    iterations, seconds
        Steps of a restart, and wall time of all restarts of one observation; None takes each
        attack's own steps, or no limit where ``seconds`` is set.
    total_seconds, budget_each
        Wall time of the whole audit, all its tiers, which its attacks share; in place of
        ``seconds``. ``bract audit --budget 10m`` sets it, or ``seconds`` with ``budget_each``.
    repeats
        Whole attacks on each observation, each with a seed of its own and its own blind pick.
    live_every
        Rounds from one that is attacked during training to the next; None attacks none.
    weak_seeds
        Seeds of a torch generator that the adaptive attacker tries against one observation's noise
        (a 16th of that against a key).
    batch
        Most observations that are attacked together; None chooses by device. Where an attack
        decomposes matrices, another one changes the last bits.
    over_rounds
        Rounds of one client that are attacked together, as uploads of the same images
        (`bract.attacks.problem.joint_case.join_rounds`), from the last chosen round backwards.
    observer
        Name of a client that attacks in the place of the server: it sees the global models alone
        (`bract.audit.observer`). None is the server.
    workers, gpus
        Most processes of this machine, or workers on a cluster, and the GPUs of one of the latter;
        None takes one a core, of this machine where that pays, or one GPU.
    """

    questions: list[str] | None = None
    attacks: list[str] = ["auto"]
    tier: Literal["all", "oblivious", "adaptive", "surrogate", "colluding"] = "all"
    rounds: list[Positive] | None = None
    clients: list[str] | None = None
    iterations: Positive | None = None
    seconds: Annotated[float, Field(gt=0.0)] | None = None
    total_seconds: Annotated[float, Field(gt=0.0)] | None = None
    budget_each: bool = False
    restarts: Positive = 1
    repeats: Positive = 1
    max_images: Positive = 8
    device: str = "auto"
    live_every: Positive | None = None
    weak_seeds: Annotated[int, Field(ge=0, le=1 << 32)] = 1 << 18
    batch: Positive | None = None
    over_rounds: Positive = 1
    observer: str | None = None
    workers: Positive | None = None
    gpus: Annotated[float, Field(gt=0.0)] | None = None
    leak: LeakConfig = LeakConfig()


class AuditRequest(AuditConfig):
    """One audit: a run's ``audit`` section under the command line's, for one tier.

    What a run directory must not choose is here and not in its configuration: files of this
    machine, and code that is imported.

    Attributes
    ----------
    key
        Key file of the client that takes part in the ``colluding`` tier.
    prior
        File of a generator trained on public images (`bract prior train`), for the ``surrogate``
        tier.
    truth
        Folder that holds ``<client>/round-NNNN.safetensors`` to score with; None takes the run's.
    models
        References ``package.module:callable`` that may be imported; see `Captures`.
    final
        File of the final global model, which anyone may get; None takes that below ``models/``.
    estimate
        Whether results carry the estimate of what an upload reveals, which decides nothing.
    """

    tier: Tier = "oblivious"
    seed: int = 0
    key: Path | None = None
    prior: Path | None = None
    truth: Path | None = None
    models: list[str] = []
    final: Path | None = None
    estimate: bool = True


Months = Annotated[int, Field(ge=1, le=120)]


class ReportConfig(Section):
    """Settings of a run's pages.

    Attributes
    ----------
    examine_again_months
        Months from the oldest result of an audit to the day by which the run is to be examined
        again. A change of what the page rests on makes it stale earlier.
    """

    examine_again_months: Months = 12
