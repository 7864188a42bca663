"""Several uploads of one client as one case: the same images, each round at its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import local_training
from bract.attacks.problem.evidence import Evidence
from bract.attacks.problem.over_rounds import (
    BUFFERS,
    PARAMETERS,
    Assigned,
    OverRounds,
    SumOverRounds,
    name_in,
)
from bract.attacks.problem.training_path import TrainingPath, moved
from bract.errors import BractError
from bract.updates.update import Tensors

ALIKE = ("model", "activation", "image_shape", "classes", "mean", "std", "norm_mode", "loss")
"""Fields of a declaration that all rounds of one case must share."""


@dataclass(frozen=True)
class JointCase(Case):
    """Uploads of one client from several rounds, opened; observation and key are the last one's.

    Attributes
    ----------
    assigned
        As `OverRounds.assigned`; None where every round took the same images.
    """

    assigned: Assigned | None = None

    @property
    def components(self) -> tuple[str, ...]:
        """As `Case.components`, and the number of rounds."""
        own = dict.fromkeys(name for case in self.rounds for name in case.components)
        return (f"{len(self.rounds)} rounds", *own)

    def simulating(self, *, unroll: int, max_images: int | None = None) -> Case:
        """Return the same rounds for another simulation of the client."""
        if self.assigned is not None:
            max_images = None
        cases = [c.simulating(unroll=unroll, max_images=max_images) for c in self.rounds]
        if all(new is old for new, old in zip(cases, self.rounds, strict=True)):
            return self
        joint = join_rounds(cases, assigned=self.assigned)
        own, new = self.evidence, joint.evidence
        kept = replace(new, buffers=own.buffers | new.buffers, notes=own.notes | new.notes)
        return replace(joint, evidence=kept)


def join_rounds(cases: Sequence[Case], *, assigned: Assigned | None = None) -> Case:
    """Make one case of a client's opened uploads: one set of images must explain all of them.

    The rounds' tensors are adjacent, so that whatever attacks one upload attacks them together: a
    matching loss runs over all rounds' coordinates (as in Li et al. 2023, *Temporal Gradient
    Inversion Attacks with Robust Optimization*, without its robust mean). A round's coordinates are
    weighed by its mean trust over their squared norm: a relative error is the mean of the rounds',
    where all are trusted alike, and rounds of which a defense leaves little known count little.
    Where defenses add noise the likelihoods multiply, without weights; rounds whose noise was taken
    away exactly, by its seed, then are left out. Every round keeps the reading that its defense
    leaves open.

    Where a round took its images in several steps, in an undeclared order, it is matched by its
    mean gradient.

    Parameters
    ----------
    cases
        One a round, in the order of rounds; one alone is returned as it is.
    assigned
        Images that each round took, where the rounds took parts of the client's images.
    """
    check_rounds(cases)
    last = cases[-1]
    if len(cases) == 1 and assigned is None:
        return last
    count = last.images if assigned is None else 1 + max(max(row) for row in assigned)
    if assigned is None:
        exact = [c for c in cases if c.evidence.likelihood is None]
        cases = exact or list(cases)
    cases = [_without_order(case) for case in cases]
    return JointCase(
        observation=last.observation,
        target_model=last.target_model,
        evidence=_joint_evidence(cases, apart=assigned is not None),
        forward=OverRounds(tuple(c.forward for c in cases), assigned),
        images=count,
        unroll=last.unroll,
        tier=last.tier,
        known=last.known,
        public=last.public,
        seconds=sum(c.seconds for c in cases),
        rounds=tuple(cases),
        assigned=assigned,
    )


def check_rounds(cases: Sequence[Case]) -> None:
    """Refuse uploads that are not several rounds of one client on one model."""
    if not cases:
        raise BractError(
            "no upload to attack over rounds: give one client's uploads, by round",
            code="attack-unsuited",
        )
    first = cases[0].observation
    earlier = 0
    for case in cases:
        seen = case.observation
        wanted: dict[str, tuple[Any, Any]] = {"client": (seen.client, first.client)}
        for name in ALIKE:
            wanted[name] = (getattr(seen.declaration, name), getattr(first.declaration, name))
        for name, (found, expected) in wanted.items():
            if found != expected:
                raise BractError(
                    f"{seen.key}: its {name} is {found!r}, that of {first.key} is {expected!r}; "
                    "an attack over rounds takes the uploads of one client on one model",
                    code="attack-unsuited",
                )
        if seen.round <= earlier:
            raise BractError(
                f"{seen.key}: follows round {earlier}; an attack over rounds takes one upload "
                "of each round, in the order of rounds",
                code="attack-unsuited",
            )
        drawn = seen.declaration.augmentation
        if len(cases) > 1 and drawn:
            raise BractError(
                f"{seen.key}: its images were augmented ({', '.join(drawn)}), anew in every round; "
                "an attack over rounds takes uploads of the same images",
                code="attack-unsuited",
            )
        earlier = seen.round
        if case.images != cases[0].images:
            raise BractError(
                f"{seen.key}: holds {case.images} images, {first.key} holds {cases[0].images}; an "
                "attack over rounds takes uploads of equally many images",
                code="attack-unsuited",
            )


def _joint_evidence(cases: Sequence[Case], *, apart: bool) -> Evidence:
    evidences = [c.evidence for c in cases]
    state: Tensors = {}
    for number, case in enumerate(cases):
        seen = case.observation
        inside = seen.buffers | case.evidence.buffers
        if isinstance(case.forward, TrainingPath):
            inside = inside | moved(seen)
        state |= {name_in(number, n, PARAMETERS): v for n, v in seen.parameters.items()}
        state |= {name_in(number, n, BUFFERS): v for n, v in inside.items()}
    likelihoods = [e.likelihood for e in evidences if e.likelihood is not None]
    noisy = len(likelihoods) == len(cases)
    return Evidence(
        target=_joined([e.target for e in evidences]) or {},
        weights=_joined([e.weights for e in evidences]) if noisy else _balanced(cases),
        alternatives=_joined([e.alternatives for e in evidences]),
        nuisance=_joint_directions(evidences),
        bounds=_joined([e.bounds for e in evidences]),
        unknown_factor=any(e.unknown_factor for e in evidences),
        likelihood=SumOverRounds(tuple(likelihoods)) if noisy else None,
        buffers=state,
        labels=None if apart else next((e.labels for e in evidences if e.labels is not None), None),
        notes={
            "rounds": [c.observation.round for c in cases],
            "by_round": [e.notes for e in evidences],
        },
    )


def _joined(groups: Sequence[Tensors | None]) -> Tensors | None:
    found = {name_in(i, n): v for i, group in enumerate(groups) for n, v in (group or {}).items()}
    return found or None


def _balanced(cases: Sequence[Case]) -> Tensors:
    """Weigh every round by its mean trust over its squared norm; the last one's norm stays."""
    evidences = [c.evidence for c in cases]
    squares, trusts = [], []
    for case, e in zip(cases, evidences, strict=True):
        own = e.weights or {}
        parts = [
            (v.double().square() * own[n].double() if n in own else v.double().square()).sum()
            for n, v in e.target.items()
        ]
        squares.append(float(torch.stack(parts).sum()))
        trusts.append(_mean_trust(case.read or e))
    found: Tensors = {}
    for number, (e, square) in enumerate(zip(evidences, squares, strict=True)):
        factor = trusts[number] * (squares[-1] / square if square and squares[-1] else 1.0)
        own = e.weights or {}
        for name, value in e.target.items():
            trust = own[name] if name in own else torch.ones_like(value)
            found[name_in(number, name)] = trust * factor
    return found


def _mean_trust(evidence: Evidence) -> float:
    """Return the mean weight of a coordinate, before weights are scaled, in [0, 1]."""
    own = evidence.weights or {}
    known = sum(
        float(own[n].double().sum()) if n in own else v.numel() for n, v in evidence.target.items()
    )
    return known / max(1, sum(v.numel() for v in evidence.target.values()))


def _joint_directions(evidences: Sequence[Evidence]) -> Tensors | None:
    """Return every round's unknown directions, zero in the coordinates of the other rounds."""
    counts = [len(next(iter(e.nuisance.values()))) if e.nuisance else 0 for e in evidences]
    if not sum(counts):
        return None
    found: Tensors = {}
    for number, e in enumerate(evidences):
        for name, value in e.target.items():
            along = value.new_zeros(sum(counts), *value.shape)
            if e.nuisance is not None and name in e.nuisance:
                begun = sum(counts[:number])
                along[begun : begun + counts[number]] = e.nuisance[name].to(along)
            found[name_in(number, name)] = along
    return found


def _without_order(case: Case) -> Case:
    training = local_training(case.forward)
    if training is None or training.batch_size >= case.images:
        return case
    return case.simulating(unroll=1)
