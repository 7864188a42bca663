"""The client's computation repeated on its true images, and compared with what was captured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bract.attacks.diagnosis import compare, is_other_optimizer
from bract.attacks.evidence import Tier
from bract.attacks.problem import Case, Problem, open_case
from bract.attacks.simulation import BatchGradient, LocalTraining, loss_gradient
from bract.attacks.victim import Victim, victim_of
from bract.errors import BractError
from bract.models import key_locks
from bract.observation import Observation
from bract.update import Tensors

ROUNDING = 1e-6
"""Distance from a cosine of 1 up to which float32 explains the difference."""

REPLAYED_STEPS = 64
"""Most local steps that are repeated."""


def truth_check(
    observation: Observation,
    images: Tensor,
    labels: Tensor,
    *,
    tier: Tier = "oblivious",
    history: Sequence[Observation] = (),
) -> dict[str, Any] | None:
    """Repeat the client's computation on its true images and compare it with the evidence.

    No attacker can do this. Without a defense it says whether the declared context (normalisation,
    mode of batch normalisation, learning rate) is that of the client; against one, how far the
    update was distorted (oblivious) or how well it was recovered (adaptive). Where the tier's
    attacker simulates the defense, the same simulation stands for the client, with what the
    evidence says of its inside.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, in order of first use.

    Returns
    -------
    dict or None
        ``cosine``, ``scale`` and ``exact`` (False where the order of later epochs is not known);
        where the match is poor, ``tried``: the cosine in other contexts, by name. None where the
        client cannot be repeated: another optimizer, more than `REPLAYED_STEPS` steps, or part of
        the model, or its noise, kept at the client.
    """
    p = observation.protocol
    steps = 1 if p.algorithm == "fedsgd" else p.local_steps
    if steps is None or steps > REPLAYED_STEPS or (steps > 1 and not p.lr):
        return None
    if is_other_optimizer(p):
        return None
    case = open_case(
        observation, tier=tier, history=history, max_images=len(images), unroll=REPLAYED_STEPS
    )
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    if key_locks(case.victim.model) or problem.unknowns():
        return None
    taken = min(len(images), steps * (p.batch_size or len(images)))
    images, labels = images[:taken], labels[:taken]
    exact = steps <= math.ceil(taken / (p.batch_size or taken))
    plain = isinstance(case.forward, BatchGradient | LocalTraining)
    if plain:
        repeated = _repeat(case.victim, observation, images, labels, steps)
    else:
        repeated = _simulate(problem, case, images, labels)
    reading = problem.reading({name: value[None] for name, value in repeated.items()})
    target = {name: value[0] for name, value in reading.items()}
    cosine, scale = compare(repeated, target, case.evidence.weights)
    tried = {}
    if plain and not cosine >= 1.0 - ROUNDING:
        for name, other in _other_contexts(case.victim, observation).items():
            try:
                again = _repeat(victim_of(other), other, images, labels, steps)
            except BractError:
                continue
            tried[name] = compare(again, target, case.evidence.weights)[0]
    return {"cosine": cosine, "scale": scale, "exact": exact, "tried": tried}


def _simulate(problem: Problem, case: Case, images: Tensor, labels: Tensor) -> Tensors:
    """What the tier's own forward model makes of the images."""
    rows = nn.functional.one_hot(labels, problem.classes)[None, : case.images].double()
    simulated = problem.simulate(images[None, : case.images].double(), rows, {})
    return {name: value.detach()[0] for name, value in simulated.items()}


def _repeat(
    victim: Victim, observation: Observation, images: Tensor, labels: Tensor, steps: int
) -> Tensors:
    """What the client computed, scaled like `Observation.gradient`, in float64.

    Unlike an attacker's simulation it knows that the last batch of an epoch may be smaller.
    """
    p = observation.protocol
    parameters = {n: observation.parameters[n].double()[None] for n in victim.parameter_names}
    buffers = {
        n: (v.double() if v.is_floating_point() else v)[None]
        for n, v in observation.buffers.items()
        if n in victim.buffer_names
    }
    victim.model.cpu()
    inputs = victim.normalise(images.double())[None]
    onehot = nn.functional.one_hot(labels, p.classes or 0).double()[None]
    size = p.batch_size or len(images)
    batches = [slice(at, at + size) for at in range(0, len(images), size)]
    current, velocity = dict(parameters), dict.fromkeys(parameters, torch.zeros(()).double())
    total = dict.fromkeys(parameters, torch.zeros(()).double())
    for step in range(steps):
        batch = batches[step % len(batches)]
        gradient = loss_gradient(victim, current, buffers, inputs[:, batch], onehot[:, batch])
        for name, value in gradient.items():
            velocity[name] = p.momentum * velocity[name] + value.detach()
            total[name] = total[name] + velocity[name]
            if steps > 1:
                current[name] = current[name] - (p.lr or 0.0) * velocity[name]
    return {name: value[0] / steps for name, value in total.items()}


def _other_contexts(victim: Victim, observation: Observation) -> dict[str, Observation]:
    p = observation.protocol
    changes: dict[str, dict[str, Any]] = {}
    if p.mean is not None or p.std is not None:
        changes["pixels without normalisation"] = {"mean": None, "std": None}
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in victim.model.modules()):
        other = "eval" if p.norm_mode == "train" else "train"
        changes[f"norm_mode: {other}"] = {"norm_mode": other}
    others = {"relu": "sigmoid", "sigmoid": "relu"}
    if p.model and ":" not in p.model and p.activation in others:
        changes[f"activation: {others[p.activation]}"] = {"activation": others[p.activation]}
    return {
        name: replace(observation, protocol=replace(p, **change))
        for name, change in changes.items()
    }
