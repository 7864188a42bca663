"""Compare candidates with each other, and with what they must keep."""

from __future__ import annotations

import math

from bract.attacks import has_attacker
from bract.config import FederationConfig
from bract.defenses import PerExample
from bract_harden.measure import quiet
from bract_harden.records import Candidate
from bract_harden.space import Space

LEAK_STEP, ACCURACY_STEP, COST_FACTOR = 0.02, 0.005, 1.5
"""Differences below which two candidates count as equal; of costs a factor."""


def violations(
    found: Candidate, config: FederationConfig, space: Space, control: Candidate | None
) -> list[str]:
    """Return the constraints that a candidate does not keep, in words."""
    limits, said = space.file.constraints, []
    accuracy = found.accuracy
    if limits.accuracy is not None and (accuracy is None or accuracy < limits.accuracy):
        said.append(f"accuracy below {limits.accuracy:g}")
    before = control.accuracy if control else None
    if limits.accuracy_loss is not None and accuracy is not None and before is not None:
        lost = before - accuracy
        if lost > limits.accuracy_loss + 1e-9:
            said.append(f"accuracy lower by {lost:.3f}, allowed {limits.accuracy_loss:g}")
    if not adaptive(config):
        said.append("no adaptive attacker knows these defenses together")
    if limits.leak == "none" and not quiet(found, encrypted=config.encryption.uses_paillier):
        said.append("a leak, or no decision, by the rule of the page")
    if limits.epsilon is not None and (found.epsilon is None or found.epsilon > limits.epsilon):
        said.append(f"epsilon above {limits.epsilon:g}")
    if limits.seconds is not None and (found.seconds or 0.0) > limits.seconds:
        said.append(f"more than {limits.seconds:g} s a round")
    if limits.bytes is not None and (found.bytes or 0.0) > limits.bytes:
        said.append(f"more than {limits.bytes} bytes an upload")
    return said


def adaptive(config: FederationConfig) -> bool:
    """Return whether an adaptive attacker reads uploads of a configuration's defenses."""
    names = [str(entry["name"]) for entry in config.defenses]
    if config.training.private is not None:
        names.insert(0, PerExample.name)
    return has_attacker(names)


def objectives(found: Candidate) -> tuple[float, float, float]:
    """Return leakage, accuracy and seconds a round, 0 where one was not measured."""
    return found.leak or 0.0, found.accuracy or 0.0, found.seconds or 0.0


def in_steps(found: Candidate) -> tuple[float, ...]:
    """Return leakage, accuracy and cost in whole steps; lower is better in each."""
    leak, accuracy, seconds = objectives(found)
    cost = math.log(max(seconds, 1e-3)) / math.log(COST_FACTOR)
    return round(leak / LEAK_STEP), -round(accuracy / ACCURACY_STEP), round(cost)


def equal(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates count as equal in every respect."""
    return in_steps(one) == in_steps(other)


def beats(one: Candidate, other: Candidate) -> bool:
    """Return whether a candidate is at least as good in every respect and better in one, by the
    steps.
    """
    first, second = in_steps(one), in_steps(other)
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
