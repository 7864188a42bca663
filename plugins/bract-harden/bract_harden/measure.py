"""What one candidate leaks, how well it learns and what it costs, from its run directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bract.audit.intervals import mean_interval, share_interval
from bract.config import FederationConfig
from bract.defenses import DEFENSES, Noise, noise_entry, read_settings
from bract.report import QuestionOutcome, run_outcome
from bract_harden.records import Candidate, Measure, QuestionLeak

RECONSTRUCTION = "reconstruction"

QUIET = ("none-leaked", "none-found", "measured")
"""Decisions of a question that mean that nothing was found."""


def measure(root: Path, config: FederationConfig, seed: int, seconds: float | None) -> Measure:
    """Return what the report of one run directory says of its candidate."""
    kinds = [DEFENSES[str(entry["name"])] for entry in config.defenses]
    found = run_outcome(root, locked=any(kind.keeps == "model" for kind in kinds))
    return Measure(
        seed=seed,
        accuracy=found.accuracy,
        seconds=found.seconds if seconds is None else seconds,
        bytes=found.bytes,
        leaks=[_leak(one) for one in found.questions],
    )


def _leak(one: QuestionOutcome) -> QuestionLeak:
    return QuestionLeak(
        question=one.question,
        value=one.value,
        levels=[one.level],
        leaked=one.leaked,
        scored=one.scored,
        attack=one.attack,
        missed=one.missed,
    )


def pooled(candidate: Candidate, config: FederationConfig) -> Candidate:
    """Return a candidate with the means over its federations, and their intervals."""
    measures = candidate.measures
    right = [m.accuracy for m in measures if m.accuracy is not None]
    spread = mean_interval(right, bounds=(0.0, 1.0)) if len(right) > 1 else None
    names = dict.fromkeys(leak.question for m in measures for leak in m.leaks)
    leaks = [_pooled(name, measures) for name in names]
    values = [leak.value for leak in leaks if leak.value is not None]
    return candidate.model_copy(
        update={
            "accuracy": _mean(right),
            "accuracy_low": spread and spread[0],
            "accuracy_high": spread and spread[1],
            "leak": max(values, default=0.0),
            "leaks": leaks,
            "seconds": _mean(m.seconds for m in measures),
            "bytes": _mean(m.bytes for m in measures),
            "epsilon": spent(config),
        }
    )


def _pooled(name: str, measures: Sequence[Measure]) -> QuestionLeak:
    own = [leak for m in measures for leak in m.leaks if leak.question == name]
    values = [leak.value for leak in own if leak.value is not None]
    spread = mean_interval(values, bounds=(0.0, 1.0)) if len(values) > 1 else None
    leaked = [v for k in own for v in [1.0] * k.leaked + [0.0] * (k.scored - k.leaked)]
    groups = [i for i, k in enumerate(own) for _ in range(k.scored)]
    share = share_interval(leaked, groups=groups) if leaked else None
    strongest = max(own, key=lambda leak: leak.value or 0.0)
    return QuestionLeak(
        question=name,
        value=_mean(values),
        low=spread and spread[0],
        high=spread and spread[1],
        levels=[level for leak in own for level in leak.levels],
        leaked=sum(leak.leaked for leak in own),
        scored=sum(leak.scored for leak in own),
        leaked_high=share and share[1],
        attack=strongest.attack,
        missed=_missed(name, own, None if share is None else share[1]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _missed(name: str, own: Sequence[QuestionLeak], most: float | None) -> str:
    if name != RECONSTRUCTION:
        return next((leak.missed for leak in own if leak.missed), "")
    if most is None:
        return "a single federation shows no spread: any share of leaks could have been missed"
    return f"up to {most:.0%} of examples could leak to these attackers without this showing it"


def quiet(candidate: Candidate, *, encrypted: bool) -> bool:
    """Return whether no question's own rule found a leak in any federation of a candidate.

    Where uploads are ciphertexts, an attack that finds nothing to attack counts as no leak.
    """
    allowed = {*QUIET, "refused", "not-attacked"} if encrypted else set(QUIET)
    return all(level in allowed for leak in candidate.leaks for level in leak.levels)


def spent(config: FederationConfig) -> float | None:
    """Return the epsilon that a configuration's noise spends over all its rounds; None without one.

    Per-example privacy counts for an example, noise on updates for a client's whole data.
    """
    private = config.training.private
    if private is not None:
        return private.epsilon
    noise = noise_entry(config.defenses)
    return None if noise is None else read_settings(Noise, noise).spent(config.rounds)
