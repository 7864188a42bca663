"""One observation, opened: what to match, how many images to look for, how to simulate a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bract.attacks.problem.client_model import (
    BatchGradient,
    ForwardModel,
    LocalTraining,
    forward_model,
    images_in,
)
from bract.attacks.problem.dropout import read_dropout
from bract.attacks.problem.evidence import (
    AdaptiveView,
    Evidence,
    Known,
    frozen,
    read_evidence,
)
from bract.attacks.problem.public_prior import PublicPrior
from bract.attacks.problem.returned_buffers import impossible_statistics
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.problem.training_path import knows_path, training_path
from bract.attacks.problem.visibility import scaled_names, visible_share
from bract.captures.observation import Observation
from bract.config.audit import Tier
from bract.config.text import TextSchema
from bract.errors import BractError
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

UNROLL = 16
"""Most local steps that are simulated one by one where an attack sets none."""

Refine = Callable[[Observation, TargetModel, Evidence], Evidence]
"""Run the stages of `Evidence.refine`."""


@dataclass(frozen=True)
class Case:
    """One observation, checked and ready to attack.

    It is opened once, by `open_case`, and passed to whatever attacks, diagnoses or checks it.

    Attributes
    ----------
    evidence
        What is matched; weights of coordinates are scaled for ``forward``.
    forward, images
        How the client is simulated, with how many images.
    unroll
        Most local steps that are simulated one by one; longer training is matched by its mean
        gradient.
    tier, known
        What the adversary knew, earlier observations of the same client included.
    public
        A generator trained on public images, where the adversary has one.
    read
        The evidence as it was read, before its weights were scaled; None takes ``evidence``.
    seconds
        Wall time that opening took, mostly to read the evidence.
    rounds
        Cases of several rounds that this one joins (`bract.attacks.problem.joint_case`); empty
        where it is one upload's.
    """

    observation: Observation
    target_model: TargetModel
    evidence: Evidence
    forward: ForwardModel
    images: int
    unroll: int = UNROLL
    tier: Tier = "oblivious"
    known: Known = field(default_factory=Known, repr=False)
    public: PublicPrior | None = field(default=None, repr=False)
    read: Evidence | None = field(default=None, repr=False)
    seconds: float = 0.0
    rounds: tuple[Case, ...] = ()

    @property
    def shape(self) -> tuple[Any, ...]:
        """Cases with equal shapes can run as one batch."""
        p = self.observation.declaration
        return (
            (p.model, p.activation, p.image_shape, p.classes, p.mean, p.std, p.norm_mode),
            self.target_model.buffer_names,
            self.images,
            self.forward,
            tuple(self.evidence.target),
            tuple(self.evidence.weights or ()),
            _counts(self.evidence.alternatives),
            _counts(self.evidence.nuisance),
            tuple(self.evidence.bounds or ()),
            self.evidence.unknown_factor,
            self.evidence.likelihood,
            self.evidence.labels is None,
            tuple(self.evidence.buffers),
            self.public and self.public.digest,
            tuple(tuple(v.shape) for v in self.evidence.target.values()),
        )

    @property
    def law(self) -> StepLaw:
        """Return how the update follows from the gradients of the client's steps."""
        return self.observation.law

    @property
    def components(self) -> tuple[str, ...]:
        """Settings of what is matched or simulated beyond one gradient, whichever attack runs."""
        names = set(self.target_model.parameter_names)
        matched = any(name not in names for name in self.evidence.target)
        return ("batch statistics",) if matched else ()

    def simulating(self, *, unroll: int, max_images: int | None = None) -> Case:
        """Return the same case for another simulation of the client; itself where none differs.

        Parameters
        ----------
        max_images
            Most images to look for; None leaves their number.
        """
        images = self.images
        if max_images is not None:
            images = images_in(self.observation.declaration, max_images)
        if (images, unroll) == (self.images, self.unroll):
            return self
        evidence = self.read or self.evidence
        forward = _forward(self.observation, evidence, images, unroll)
        if (images, forward) != (self.images, self.forward):
            evidence = _scaled(self.target_model, self.observation, forward, evidence, images)
        else:
            evidence = self.evidence
        return replace(self, evidence=evidence, forward=forward, images=images, unroll=unroll)


def open_case(
    observation: Observation,
    *,
    tier: Tier,
    known: Known | None = None,
    max_images: int,
    unroll: int = UNROLL,
    refine: Refine | None = None,
    view: AdaptiveView | None = None,
    public: PublicPrior | None = None,
) -> Case:
    """Check an observation and decide what to match and how many images to look for.

    Parameters
    ----------
    refine
        What runs the stages of an evidence that has some; None matches it as it was read.
    view
        How to read the evidence, in the place of the tier's own way.
    public
        A generator trained on public images, where the adversary has one.
    """
    target_model, known = target_model_of(observation), known or Known()
    try:
        images = images_in(observation.declaration, max_images)
    except BractError as error:
        raise BractError(f"{observation.key}: {error}", code=error.code) from error
    evidence = view(observation, known) if view else read_evidence(observation, tier, known)
    if evidence.refine is not None and refine is not None:
        evidence = refine(observation, target_model, evidence)
    if evidence.refine is not None and not evidence.target:
        raise BractError(
            f"{observation.key}: its evidence must be refined on an engine before it is matched; "
            "open it by bract.attacks.open_cases",
            code="attack-unsuited",
        )
    dropout = read_dropout(observation, target_model)
    if dropout.note is not None:
        evidence = replace(
            evidence,
            buffers=evidence.buffers | dropout.masks,
            notes=evidence.notes | {"dropout": dropout.note},
        )
    impossible = impossible_statistics(observation, target_model)
    if impossible is not None:
        evidence = replace(evidence, notes=evidence.notes | {"batch_statistics": impossible})
    names = {*target_model.parameter_names, *observation.buffers}
    strange = sorted(set(evidence.target) - names)
    if strange or not evidence.target:
        raise BractError(
            f"{observation.key}: nothing to match among {', '.join(strange[:5])}",
            code="attack-evidence",
        )
    if not any(bool(value.any()) for value in evidence.target.values()):
        raise BractError(
            f"{observation.key}: the update is zero in every coordinate", code="attack-evidence"
        )
    if not all(bool(value.isfinite().all()) for value in evidence.target.values()):
        p, law = observation.declaration, observation.law
        raise BractError(
            f"{observation.key}: the update is not finite as a gradient, by a learning rate of "
            f"{p.lr or 0.0:g}, {law.steps} steps and a weight decay of {p.weight_decay:g}; "
            "correct the declaration",
            code="declaration-wrong",
        )
    forward = _forward(observation, evidence, images, unroll)
    return Case(
        observation=observation,
        target_model=target_model,
        evidence=_scaled(target_model, observation, forward, evidence, images),
        forward=forward,
        images=images,
        unroll=unroll,
        tier=tier,
        known=known,
        public=public,
        read=evidence,
    )


def _forward(
    observation: Observation, evidence: Evidence, images: int, unroll: int
) -> ForwardModel:
    forward = evidence.forward or forward_model(
        observation.declaration, images=images, unroll=unroll
    )
    if evidence.adapt is not None:
        return evidence.adapt(forward, images)
    if evidence.forward is None and isinstance(forward, BatchGradient) and knows_path(observation):
        return training_path(observation, images)
    if isinstance(forward, LocalTraining) and not observation.declaration.defenses:
        return replace(forward, frozen=tuple(frozen(observation)))
    return forward


def _scaled(
    target_model: TargetModel,
    observation: Observation,
    forward: ForwardModel,
    evidence: Evidence,
    images: int,
) -> Evidence:
    """Scale weights so that two images stay as far apart as they are undefended."""
    scaled = scaled_names(target_model, evidence)
    if not any(name in scaled for name in evidence.weights or ()):
        return evidence
    share = visible_share(target_model, observation, forward, evidence, images)
    weights = dict(evidence.weights or {})
    for name in scaled:
        own = weights.get(name)
        weights[name] = (torch.ones_like(evidence.target[name]) if own is None else own) / share
    return replace(evidence, weights=weights, notes=evidence.notes | {"visible": share})


def _counts(group: Tensors | None) -> tuple[tuple[str, int], ...]:
    return tuple((name, len(value)) for name, value in (group or {}).items())


def text_schema(case: Case) -> TextSchema:
    """Return the declared schema of the texts."""
    schema = case.observation.declaration.text
    if schema is None:
        raise BractError(
            f"{case.observation.key}: no schema of texts is declared; its vocabulary and length "
            "are needed (data.text)",
            code="declaration-lacks",
        )
    return schema
