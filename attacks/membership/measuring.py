"""Models of one round, and what they make of candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.evidence import Evidence, Known, read_evidence
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.result import SeedBudget
from bract.attacks.solve.engine import Engine
from bract.captures.observation import Observation
from bract.config.audit import Tier
from bract.errors import BractError
from bract.updates.update import Tensors, apply_update

GRADIENTS_AT_ONCE = 64
"""Per-example gradients that are computed together."""

OUTPUTS_AT_ONCE = 512

MOST_NUMBERS = 1 << 26
"""Entries of the matrix of all candidates' gradients, half a gigabyte."""

REFINEMENT = 20.0
"""Most seconds to refine what an adaptive attacker reads in one upload, where none are given."""

MOST_REFINED = 8
"""Most images of an upload whose evidence is refined by fitting them; minutes beyond that."""

RIDGE = 1e-2
"""Of `coefficients`, as a share of the mean squared norm of a gradient."""


@dataclass(frozen=True)
class LocalModel:
    """One client's round as an adversary of a tier reads it.

    Batch normalisation uses running statistics, so that no candidate's output depends on another.

    Attributes
    ----------
    model
        The architecture, in evaluation mode; its own values are never used.
    sent, local
        State of the global model, and of the client's model after training: what was sent less what
        the evidence says of the update.
    update
        The update as it was read, by parameter name.
    """

    target: TargetModel
    model: nn.Module
    sent: Tensors
    local: Tensors
    update: Tensors


def local_model(
    observation: Observation,
    *,
    tier: Tier = "oblivious",
    history: Sequence[Observation] = (),
    engine: Engine | None = None,
    weak_seeds: SeedBudget | None = None,
) -> LocalModel:
    """Read one upload as an adversary of this tier does, with `REFINEMENT` seconds of refinement.

    Raises
    ------
    BractError
        If it is encrypted, its model is not known, or no adaptive attacker reads it.
    """
    evaluated = replace(observation.declaration, norm_mode="eval")
    target = target_model_of(replace(observation, declaration=evaluated))
    known = Known(history=history, weak_seeds=weak_seeds or SeedBudget())
    evidence = read_evidence(observation, tier, known)
    if evidence.refine is not None:
        evidence = _refined(observation, evidence, engine or Engine(), tier, REFINEMENT)
    update = _update_of(observation, evidence)
    added = {n: v for n, v in evidence.buffers.items() if n in target.buffer_names}
    sent = observation.parameters | {
        n: v for n, v in (observation.buffers | added).items() if n in target.buffer_names
    }
    returned = {
        n: v
        for n, v in observation.returned_buffers.items()
        if n in target.buffer_names and not (v.is_floating_point() and not v.isfinite().all())
    }
    local = apply_update(observation.parameters, update, 1.0)
    model = target.model.eval()
    return LocalModel(target, model, sent, sent | local | returned | added, update)


def global_model(before: Observation, after: Tensors) -> LocalModel:
    """Return a round of the whole federation: the global models that it began and ended with.

    Parameters
    ----------
    before
        Declares the model and holds the global model that was sent. Its update is not read.
    after
        State of the next one.

    Raises
    ------
    BractError
        If the state is not one of the declared model.
    """
    for name, value in before.parameters.items():
        found = tuple(after[name].shape) if name in after else None
        if found != tuple(value.shape):
            raise BractError(
                f"{before.key}: {name} was sent as {tuple(value.shape)} and is "
                f"{found or 'missing'} in the global model; give a model of this run",
                code="capture-lacks",
            )
    evaluated = replace(before.declaration, norm_mode="eval")
    update = {n: v - after[n] for n, v in before.parameters.items()}
    shown = replace(before, declaration=evaluated, update=update, ciphertexts={})
    target = target_model_of(shown)
    sent = before.parameters | {n: v for n, v in before.buffers.items() if n in target.buffer_names}
    kept = {n: v for n, v in after.items() if n in sent or n in target.buffer_names}
    return LocalModel(target, target.model.eval(), sent, sent | kept, update)


def _refined(
    observation: Observation, evidence: Evidence, engine: Engine, tier: Tier, seconds: float | None
) -> Evidence:
    """Refine an evidence where the upload is of few images; more leave it as it was read."""
    count = images_in(observation.declaration, 1 << 31)
    if count <= MOST_REFINED:
        target = target_model_of(observation)
        return engine.refine(observation, target, evidence, seconds=seconds, tier=tier)
    if not evidence.target:
        raise BractError(
            f"{observation.key}: the {tier} tier reads this defense by fitting the images of the "
            f"upload, {count} of them, and does so for {MOST_REFINED} at most",
            code="attack-unsuited",
        )
    return evidence


def _update_of(observation: Observation, evidence: Evidence) -> Tensors:
    """Return what the client's parameters moved by, from a target scaled like a gradient."""
    law = observation.law
    step = law.rate if law.averaging else law.lr or 1.0
    zero = {n: torch.zeros_like(v) for n, v in observation.parameters.items()}
    read = {n: v * step for n, v in evidence.target.items() if n in zero}
    for name, value in read.items():
        if not bool(value.isfinite().all()):
            raise BractError(
                f"{observation.key}: {name} is not finite as it was read", code="attack-evidence"
            )
    return zero | read


@torch.no_grad()
def logits_of(model: nn.Module, state: Tensors, inputs: Tensor) -> Tensor:
    """Return outputs ``(N, classes)`` for normalised inputs ``(N, ...)``."""
    parts = [functional_call(model, state, (part,)) for part in inputs.split(OUTPUTS_AT_ONCE)]
    return torch.cat(parts)


def alignments(
    found: LocalModel, inputs: Tensor, labels: Tensor, updates: Sequence[Tensors]
) -> Tensor:
    """Return the cosines of every candidate's gradient and each of K updates, ``(K, N)``.

    The gradients are those of the declared loss at the global model.
    """
    names = _names(found)
    directions = torch.stack([_vector(u, names) for u in updates])
    directions = directions / directions.norm(dim=1, keepdim=True).clamp_min(1e-30)
    cosines = []
    for rows in _gradients(found, found.sent, inputs, labels):
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
        cosines.append(directions.to(rows.dtype) @ rows.T)
    return torch.cat(cosines, dim=1)


def gradients_on_the_way(
    found: LocalModel, inputs: Tensor, labels: Tensor, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of N candidates, float64 ``(N, D)``, and the update, ``(D,)``.

    The gradients are those half way between the two models, along which the client moved. Beyond
    `MOST_NUMBERS` entries, coordinates are drawn, the same of both.
    """
    names = _names(found)
    update = _vector(found.update, names)
    middle = {
        n: (v + found.local[n]) / 2 if v.is_floating_point() else v for n, v in found.sent.items()
    }
    most = max(1, MOST_NUMBERS // max(1, len(inputs)))
    kept = torch.arange(len(update))
    if most < len(update):
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randperm(len(update), generator=generator)[:most]
    parts = [rows[:, kept] for rows in _gradients(found, middle, inputs, labels)]
    return torch.cat(parts).to(torch.float64), update[kept].to(torch.float64)


def coefficients(rows: Tensor, update: Tensor) -> Tensor:
    """Return how much of each candidate's gradient is in the update, beside all others, ``(N,)``.

    With the gradients of N candidates as the rows of G and the update u, these are the ridge
    regression's ``(G G^T + r I)^-1 G u``: what candidates have in common counts for none of them.

    Parameters
    ----------
    rows, update
        Of `gradients_on_the_way`.
    """
    gram = rows @ rows.T
    ridge = RIDGE * float(gram.diagonal().mean()) + 1e-30
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    share: Tensor = torch.linalg.solve(system, rows @ update)
    return share


def _names(found: LocalModel) -> list[str]:
    return [n for n, _ in found.model.named_parameters() if n in found.sent]


def _vector(update: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([update[n].reshape(-1) for n in names])


def _gradients(
    found: LocalModel, state: Tensors, inputs: Tensor, labels: Tensor
) -> Iterator[Tensor]:
    """Yield the gradients of each candidate's loss, ``(n, D)`` for n candidates at a time."""
    names = _names(found)
    moved = {n: state[n] for n in names}
    fixed = {n: v for n, v in state.items() if n not in moved}

    def loss(parameters: Tensors, image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(found.model, parameters | fixed, (image[None],))
        return found.target.loss.mean(logits, label[None])

    one = grad(loss)
    together: Callable[..., Tensors] = vmap(one, in_dims=(None, 0, 0))
    try:
        together(moved, inputs[:2], labels[:2])
    except RuntimeError:  # a model whose path depends on its input, such as a mask's
        together = partial(_in_turn, one)
    at_once = GRADIENTS_AT_ONCE
    for images, wanted in zip(inputs.split(at_once), labels.split(at_once), strict=True):
        gradients = together(moved, images, wanted)
        yield torch.cat([gradients[n].flatten(1) for n in names], dim=1)


def _in_turn(
    one: Callable[..., Tensors], parameters: Tensors, images: Tensor, labels: Tensor
) -> Tensors:
    """Return what `vmap` would, one example after the other."""
    found = [one(parameters, *pair) for pair in zip(images, labels, strict=True)]
    return {name: torch.stack([part[name] for part in found]) for name in parameters}
