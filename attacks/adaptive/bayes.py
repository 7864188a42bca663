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

Chains compose: parts that are functions of the gradient are simulated before the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bract.attacks.adaptive.noise import discount_noise, noise_after
from bract.attacks.adaptive.pruning import bound_dropped, match_survivors
from bract.attacks.adaptive.simulated_defense import Prune
from bract.attacks.adaptive.soteria import mute_pruned_features
from bract.attacks.base import Attacker
from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.evidence import (
    ADAPTIVE,
    CHAINS,
    AdaptiveView,
    Evidence,
    Known,
    read_evidence,
)
from bract.attacks.result import Reconstruction, Refusal
from bract.attacks.task import OF_ONE_CASE, AttackTask, refusal
from bract.defenses.entries import read_settings
from bract.defenses.pruning import Pruning
from bract.errors import BractError
from bract.protocol.observation import Observation

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
        raise BractError(f"{observation.key}: no defense is declared; there is nothing to know")
    found = read_evidence(observation, "adaptive", known)
    if len(names) == 1 and names[0] in DETERMINISTIC:
        return replace(found, notes=found.notes | {"likelihood": DETERMINISTIC[names[0]]})
    return found


def pruned_and_noisy(observation: Observation, known: Known) -> Evidence:
    """Pruning, then noise: Gaussian or Laplace around the clipped, pruned update.

    ``-log p(u | x) = |u - c(P(g)) P(g)|^2 / (2 sigma^2)`` with P the pruning of the candidate's own
    gradient. Which coordinates were dropped does not show under noise; each candidate determines
    it.
    """
    first, last = observation.declaration.defenses
    hyper = read_settings(Pruning, first)
    found = noise_after(_declaring(observation, last), known, Prune(hyper.ratio, hyper.scope))
    if found.likelihood is None:
        # The noise is gone: what is left is a pruned update.
        kept = {n: (v != 0).to(v.dtype) for n, v in found.target.items()}
        found = replace(found, weights=kept)
    return replace(found, notes=found.notes | {"defense": "pruning, noise"})


def muted_and_pruned(observation: Observation, known: Known) -> Evidence:
    """Soteria, then pruning: bounds on dropped coordinates, none in columns that are zero."""
    first, last = observation.declaration.defenses
    muted = mute_pruned_features(_declaring(observation, first), known)
    found = bound_dropped(_declaring(observation, last), known)
    return replace(
        found,
        weights=muted.weights,
        notes=found.notes | {"defense": "soteria, pruning", "pruned": muted.notes["pruned"]},
    )


def _declaring(observation: Observation, *defenses: Any) -> Observation:
    declaration = replace(observation.declaration, defenses=defenses)
    return replace(observation, declaration=declaration)


CHAINS |= {("pruning", "noise"): pruned_and_noisy, ("soteria", "pruning"): muted_and_pruned}

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
        raise BractError(f"{observation.key}: one defense at a time, declared are {names}")
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
