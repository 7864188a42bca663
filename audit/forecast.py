"""Estimate before an audit how long it takes, and of which uploads nothing can be expected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bract.attacks import ATTACKS
from bract.attacks.base import SECONDS
from bract.attacks.problem.client_model import images_in
from bract.audit.questions.base import Probe
from bract.audit.results import Batch
from bract.errors import BractError
from bract.process.peak_memory import watched_memory
from bract.updates.step_law import StepLaw

if TYPE_CHECKING:
    from bract.audit.audit import Audit

PROBE = 2.0
"""Seconds of attacking by which the time of one kind of work is estimated."""

KINDS = 4
"""Most kinds of work that are measured; the others are taken to be like the mean of these."""


@dataclass(frozen=True)
class Infeasible:
    """Uploads of which nothing can be expected, and why."""

    uploads: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Forecast:
    """What an audit will take.

    Attributes
    ----------
    uploads, attacks
        Number of observations, and of whole attacks on them.
    seconds
        Wall time, estimated from a moment of each kind of work, or what a budget in seconds
        comes to; None where nothing could be measured.
    device
        ``cpu`` or ``cuda:N``.
    memory
        Bytes that the largest kind of work took at its height in that moment, beyond what the
        process held; None where nothing was measured.
    trials
        Restarts of uploads that ran together then.
    infeasible
        Uploads of which nothing can be expected.
    """

    uploads: int
    attacks: int
    seconds: float | None
    device: str
    memory: int | None = None
    trials: int = 0
    infeasible: tuple[Infeasible, ...] = ()


def forecast(audits: Iterable[Audit], *, measure: bool = True) -> Forecast:
    """Estimate the work that is left of audits, one a tier; nothing is written.

    An estimate costs `PROBE` seconds a kind of work, `KINDS` kinds at most; ``measure``
    false leaves it out.
    """
    measured: list[tuple[int, float]] = []
    held: list[tuple[int, int]] = []
    unmeasured = attacks = 0
    keys: set[str] = set()
    infeasible: dict[str, dict[str, None]] = {}
    device = "cpu"
    for audit in audits:
        device = audit.device
        probed: dict[tuple[str, str], Probe | None] = {}
        # The dearest kinds are the ones that are measured.
        for batch in sorted(audit.plan(), key=_declared_seconds, reverse=True):
            count = len(batch.captures)
            attacks += count
            keys.update(capture.key for capture in batch.captures)
            for capture in batch.captures:
                reason = audit.question(batch).infeasible(batch, capture)
                if reason is not None:
                    infeasible.setdefault(reason, {})[capture.key] = None
            kind = (batch.attack, _kind(batch, audit.request.max_images))
            if measure and kind not in probed and len(measured) < KINDS:
                with watched_memory(device) as peak:
                    probed[kind] = _probe(audit, batch)
                if (found := probed[kind]) is not None and found.trials:
                    held.append((peak.bytes or 0, found.trials))
            each = probed.get(kind)
            if each is None:
                unmeasured += count
            else:
                measured.append((count, each.seconds * count))
    seconds = sum(total for _, total in measured) if measured else None
    if seconds is not None and unmeasured:
        seconds *= 1 + unmeasured / sum(count for count, _ in measured)
    memory, trials = max(held, default=(0, 0))
    return Forecast(
        uploads=len(keys),
        attacks=attacks,
        seconds=seconds,
        device=device,
        memory=memory or None,
        trials=trials,
        infeasible=tuple(Infeasible(tuple(found), reason) for reason, found in infeasible.items()),
    )


def _declared_seconds(batch: Batch) -> float:
    return SECONDS[ATTACKS[batch.attack].cost] if batch.attack in ATTACKS else 0.0


def _kind(batch: Batch, max_images: int) -> str:
    first = batch.captures[0]
    declaration = first.declaration
    try:
        images = images_in(declaration, max_images)
    except BractError:
        images = 0
    steps = min(StepLaw.of(declaration).counted, 17)
    return f"{declaration.model} {declaration.image_shape} {images} {steps} {declaration.defenses}"


def _probe(audit: Audit, batch: Batch) -> Probe | None:
    """Measure a moment of a batch, or take the budget in seconds for each upload."""
    limit = audit.seconds
    return audit.question(batch).probe(batch, PROBE) if limit is None else Probe(limit, 0)
