"""The Bayes-optimal adversary (Balunovic et al., ICLR 2022), approximated by the posterior's mode.

He knows the defense, not its randomness, and maximises
``log p(upload | image, label) + log p(image)``. What p(upload | image, label) is, per defense:

- noise, with or without clipping: Gaussian or Laplace around the clipped update
  (`bract.attacks.adaptive.noise.weigh_noise`);
- pruning: a step, 1 where survivors are met and the others are below the smallest of them
  (`bract.attacks.adaptive.pruning.bound_dropped`);
- soteria: a function of the batch here, ``delta(u - g)`` on all coordinates but the pruned columns,
  times 1 where the columns are those of lowest sensitivity. The first factor is what
  `mute_pruned_features` matches. The second would take one second derivative a feature and step,
  and is left out: it can only lower the likelihood of candidates that match all the rest;
- precode: given image and noise epsilon the update is exact, ``delta(u - g(x, epsilon))
  N(epsilon; 0, I)``. For one image epsilon is the one value that the update allows (`read_noise`);
  for several it is searched jointly, and with an exact likelihood the finite weight ``|epsilon|^2 /
  2`` vanishes. That is what `undo_precode` does;
- adadefense, guardian: functions of the update (and of earlier uploads), ``delta(u - T(g(x)))``:
  no noise, nothing to weigh against a prior. Their adaptive attackers invert T;
- fedkl: a function of the update and of gamma and beta, which are unknowns with no known density:
  searched jointly by `regress_lock`.

Chains compose: parts that are functions of the gradient are simulated before the noise
(`bract.attacks.adaptive.chains`). The adaptive tier reads this way; the attackers before it, which
know a defense without its likelihood, are kept here for the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from bract.attacks.adaptive.clipping_factor import shrinkage
from bract.attacks.adaptive.noise import checked_noise, without_noise
from bract.attacks.adaptive.pruning import checked_pruning, surviving_share
from bract.attacks.adaptive.weak_seeds import find_noise_seed
from bract.attacks.base import Attacker
from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.evidence import (
    ADAPTIVE,
    AdaptiveView,
    Evidence,
    Known,
    read_evidence,
)
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.result import Reconstruction, Refusal
from bract.attacks.task import OF_ONE_CASE, AttackTask, refusal
from bract.captures.observation import Observation
from bract.defenses.noise import Noise
from bract.errors import BractError

DETERMINISTIC = {
    "soteria": "exact outside the pruned columns, whose choice is a function of the batch",
    "precode": "exact given the bottleneck's noise, which is read or searched with the images",
    "adadefense": "exact: the upload is a function of the updates",
    "guardian": "exact: the upload is a function of the update",
    "fedkl": "exact given gamma and beta, which are searched with the images",
}
"""Why a defense's likelihood is degenerate; its adaptive attacker is used as the Bayes one."""


def bayes_evidence(observation: Observation, known: Known) -> Evidence:
    """Read an upload as the Bayes adversary of the adaptive tier does.

    Where the likelihood is degenerate (`DETERMINISTIC`) this is what the defense's adaptive
    attacker reads, and ``notes["likelihood"]`` gives the reason.
    """
    names = tuple(str(d.get("name", "?")) for d in observation.declaration.defenses)
    if not names:
        raise BractError(
            f"{observation.key}: no defense is declared; there is nothing to know",
            code="declaration-lacks",
        )
    found = read_evidence(observation, "adaptive", known)
    if len(names) == 1 and names[0] in DETERMINISTIC:
        return replace(found, notes=found.notes | {"likelihood": DETERMINISTIC[names[0]]})
    return found


def discount_noise(observation: Observation, known: Known) -> Evidence:
    """Weigh every tensor by the share of its energy that is not noise.

    With x the captured tensor and s the known deviation, the weight is
    ``max(0, 1 - s^2 / mean(x^2))``, the gain of the Wiener filter for that tensor.

    Clipping divides the whole update by one unknown factor of at least 1. ``notes["clipped"]``
    records whether the norm, without the noise expected in it, reaches the bound. If it does, the
    factor is read off the last layer where that determines it (`shrinkage`: one example, one step,
    little noise) and left open otherwise (`Evidence.unknown_factor`).

    Seeds are tried and declarations checked as in `bract.attacks.adaptive.noise.weigh_noise`.
    """
    hyper, energy, count = checked_noise(observation)
    deviation = hyper.deviation
    search = find_noise_seed(observation, hyper, known.weak_seeds)
    if search.update is not None:
        return without_noise(observation, hyper, search)
    wanted = observation.gradient()
    weights, signal = {}, {}
    for name in observation.parameters:
        square = float(observation.update[name].to(torch.float64).square().mean())
        signal[name] = max(0.0, 1.0 - deviation**2 / square) if square else 0.0
        weights[name] = torch.full_like(wanted[name], signal[name])
    if not any(signal.values()):
        weights = {name: torch.ones_like(wanted[name]) for name in observation.parameters}
    notes: dict[str, Any] = {
        "defense": "noise",
        "method": "weighted every tensor by its share of signal",
        "deviation": deviation * observation.law.to_gradient,
        "signal": signal,
        "clipped": _clipped(hyper, energy, count, deviation),
        **search.notes(),
    }
    target = {name: wanted[name] for name in observation.parameters}
    if notes["clipped"].startswith("no"):
        return Evidence(target=target, weights=weights, notes=notes)
    factor = shrinkage(observation, target_model_of(observation), target)
    notes["factor"] = factor
    if factor is not None:
        target = {name: value * factor for name, value in target.items()}
    return Evidence(target=target, weights=weights, unknown_factor=factor is None, notes=notes)


def match_survivors(observation: Observation, known: Known) -> Evidence:
    """Trust the coordinates that are not exactly zero, and no others.

    A survivor is exact; of a dropped coordinate only its bound is known.
    """
    del known
    checked_pruning(observation)
    wanted = observation.gradient()
    weights = {n: (wanted[n] != 0).to(wanted[n].dtype) for n in observation.parameters}
    return Evidence(
        target={n: wanted[n] for n in observation.parameters},
        weights=weights,
        notes={
            "defense": "pruning",
            "method": "matched surviving coordinates only",
            "surviving": surviving_share(observation),
        },
    )


BEFORE_BAYES: dict[str, AdaptiveView] = {"noise": discount_noise, "pruning": match_survivors}
"""Adaptive attackers that know the defense without its likelihood, for comparisons."""


def bayesian(using: Attacker) -> Attacker:
    """Return an attack as the Bayes adversary runs it, whatever tier is asked for.

    Descents minimise the likelihood and a prior in nats in the place of their own objective and
    priors where the likelihood is a density (`bract.attacks.solve.matching.minimise`); elsewhere
    they match the evidence of `bayes_evidence` with their own.
    """
    return _Through(using=using, view=bayes_evidence)


def before_bayes(using: Attacker) -> Attacker:
    """Return an attack on what `BEFORE_BAYES` reads: the comparison that `bayesian` is held to."""
    return _Through(using=using, view=_without_likelihood)


def _without_likelihood(observation: Observation, known: Known) -> Evidence:
    names = [str(d.get("name", "?")) for d in observation.declaration.defenses]
    if len(names) != 1:
        raise BractError(
            f"{observation.key}: one defense at a time, declared are {names}",
            code="declaration-wrong",
        )
    return (BEFORE_BAYES.get(names[0]) or ADAPTIVE[names[0]])(observation, known)


@dataclass(frozen=True, kw_only=True)
class _Through(Attacker):
    """An attack on observations that are read in another way than its tier's."""

    name: ClassVar[str] = "bayes"

    using: Attacker
    view: AdaptiveView

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        outcomes: dict[int, Reconstruction | Refusal] = {}
        read: dict[int, Case] = {}
        for index, case in enumerate(cases):
            try:
                read[index] = self._read(case, task)
            except OF_ONE_CASE as error:
                outcomes[index] = refusal(self.using.name, case.observation, error)
        found = self.using.run(list(read.values()), task)
        outcomes |= dict(zip(read, found, strict=True))
        return [outcomes[index] for index in range(len(cases))]

    def _read(self, case: Case, task: AttackTask) -> Case:
        def refine(observation: Observation, target_model: Any, evidence: Evidence) -> Evidence:
            return task.engine.refine(observation, target_model, evidence, tier=task.tier)

        return open_case(
            case.observation,
            tier="adaptive",
            known=case.known,
            max_images=case.images,
            unroll=case.unroll,
            refine=refine,
            view=self.view,
        )


def _clipped(hyper: Noise, energy: float, count: int, deviation: float) -> str:
    if hyper.clip is None:
        return "no: nothing was clipped"
    how = "a factor in (0, 1]"
    if hyper.kind == "laplace" and hyper.epsilon is not None:
        return f"unknown: clipped in the 1-norm, by {how}"
    fourth = 3.0 if hyper.kind == "gaussian" else 6.0
    square = energy - count * deviation**2
    doubt = 3.0 * (deviation**2 * math.sqrt((fourth - 1.0) * count) + 2.0 * deviation * hyper.clip)
    if square + doubt < hyper.clip**2 * (1.0 - 1e-5):
        return "no: the norm without the noise is below the bound"
    return f"possibly: the norm reaches the bound; by {how}"
