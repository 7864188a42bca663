"""Why an attack got no further: what can be measured about one observation and one result.

These are numbers; `bract.server.report.diagnosis` says what they mean, and from which value on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bract.attacks.evidence import Tier
from bract.attacks.labels import last_layer
from bract.attacks.problem import Case, Problem, open_case
from bract.attacks.reconstruction import Reconstruction
from bract.attacks.simulation import BatchGradient, images_in, loss_gradient
from bract.attacks.victim import Victim, victim_of
from bract.errors import BractError
from bract.observation import Observation
from bract.update import Tensors, flatten

FLAT = 0.01
"""A sigmoid passes less than this share of what reaches it: it is saturated. Its most is 0.25."""

ROUNDING = 1e-6
"""Distance from a cosine of 1 up to which float32 explains the difference."""

REPLAYED_STEPS = 64
"""Most local steps that the truth check repeats."""

_MANY = 10**9
_RECTIFIERS = (nn.ReLU, nn.ReLU6)


def signals(
    observation: Observation,
    result: Reconstruction,
    *,
    tier: Tier,
    history: Sequence[Observation] = (),
    max_images: int,
    unroll: int = 16,
) -> dict[str, Any]:
    """Measure what an attacker can measure, JSON-ready; what does not apply is None.

    Returns
    -------
    dict
        ``scale``: factor by which the evidence is longer than what the images would have caused,
        along their common direction. ``layers``: each tensor's cosine, and its root mean square as
        a share of the largest. ``zero``: share of coordinates that are exactly 0. ``dead``: share
        of units that pass nothing on for any image, at the captured parameters. ``negative``,
        ``unbalanced``, ``unsure``: coordinates of the last bias' gradient below 0, the size of
        its sum as a share of the sum of sizes (0 under cross entropy), and its positive part: the
        probability that the model gives to wrong classes, in the mean over examples. ``images``
        and ``steps``: declared, and searched or simulated. ``norm`` of the evidence, and
        ``norm_ratio`` to the client's first captured one. ``falling``: share by which the loss
        fell in the last tenth of the search.
    """
    case = open_case(observation, tier=tier, history=history, max_images=max_images, unroll=unroll)
    target = case.evidence.target
    protocol = observation.protocol
    steps = 1 if protocol.algorithm == "fedsgd" else protocol.local_steps
    one = isinstance(case.forward, BatchGradient)
    return {
        **_match(case, result),
        "zero": float((flatten(target) == 0).double().mean()),
        "dead": dead_units(case.victim, observation.parameters, observation.buffers, result.images),
        **_slope(case),
        "images": {"declared": images_in(protocol, _MANY), "searched": case.images},
        "steps": {"declared": steps, "simulated": 1 if one else steps},
        "norm": float(flatten(target).double().norm()),
        "norm_ratio": _norm_ratio(observation, history),
        "falling": _falling(result.loss_curve),
    }


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
    update was distorted (oblivious) or how well it was recovered (adaptive).

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
        the model kept at the client.
    """
    p = observation.protocol
    steps = 1 if p.algorithm == "fedsgd" else p.local_steps
    if (
        steps is None
        or steps > REPLAYED_STEPS
        or (steps > 1 and (p.optimizer != "sgd" or not p.lr))
    ):
        return None
    case = open_case(
        observation, tier=tier, history=history, max_images=len(images), unroll=REPLAYED_STEPS
    )
    if case.forward.unknowns(case.victim, 1, [torch.Generator().manual_seed(0)]):
        return None
    target, weights = case.evidence.target, case.evidence.weights
    taken = min(len(images), steps * (p.batch_size or len(images)))
    replayed = _replay(case.victim, observation, images[:taken], labels[:taken], steps)
    cosine, scale = _compare(replayed, target, weights)
    tried = {}
    if not math.isfinite(cosine) or cosine < 1.0 - ROUNDING:
        for name, other in _other_contexts(case.victim, observation).items():
            try:
                again = _replay(victim_of(other), other, images[:taken], labels[:taken], steps)
            except BractError:
                continue
            tried[name] = _compare(again, target, weights)[0]
    exact = steps <= math.ceil(taken / (p.batch_size or taken))
    return {"cosine": cosine, "scale": scale, "exact": exact, "tried": tried}


def dead_units(
    victim: Victim, parameters: Tensors, buffers: Tensors, images: Tensor
) -> float | None:
    """Share of units that pass no gradient on, whichever of the images comes.

    A rectifier's unit is dead where its output is 0, a sigmoid's where its slope is below `FLAT`;
    of convolutions a whole channel counts as one unit. None where the model has neither as a
    module.
    """
    dead, units = 0, 0
    handles = []

    def look(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal dead, units
        value = output.detach()
        passes = value > 0 if isinstance(module, _RECTIFIERS) else value * (1 - value) >= FLAT
        alive = passes.flatten(2).any(2).any(0) if passes.dim() > 2 else passes.any(0)
        dead += int((~alive).sum())
        units += alive.numel()

    for module in victim.model.modules():
        if isinstance(module, (*_RECTIFIERS, nn.Sigmoid)):
            handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            state = {n: parameters[n].cpu().float() for n in victim.parameter_names}
            state |= {n: buffers[n].cpu() for n in victim.buffer_names}
            victim.model.cpu()
            functional_call(victim.model, state, (victim.normalise(images.float()),))
    finally:
        for handle in handles:
            handle.remove()
    return dead / units if units else None


def _match(case: Case, result: Reconstruction) -> dict[str, Any]:
    target = case.evidence.target
    largest = max(float(v.double().square().mean().sqrt()) for v in target.values())
    layers: dict[str, dict[str, float | None]] = {
        name: {"cosine": None, "size": float(v.double().square().mean().sqrt()) / largest}
        for name, v in target.items()
    }
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    if problem.unknowns():
        return {"scale": None, "layers": layers}
    simulated = problem.simulate(
        result.images[None].double(), result.label_probabilities[None].double(), {}
    )
    flat = {name: value.detach()[0] for name, value in simulated.items()}
    for name, found in layers.items():
        found["cosine"] = _compare({name: flat[name]}, {name: target[name]}, None)[0]
    return {"scale": _compare(flat, target, case.evidence.weights)[1], "layers": layers}


def _slope(case: Case) -> dict[str, float | int | None]:
    try:
        _, name = last_layer(case.victim)
    except BractError:
        name = None
    slope = case.evidence.target.get(name) if name else None
    if slope is None:
        return {"negative": None, "unbalanced": None, "unsure": None}
    values = slope.double()
    return {
        "negative": int((values < 0).sum()),
        "unbalanced": float(values.sum().abs() / values.abs().sum().clamp_min(1e-30)),
        "unsure": float(values.clamp_min(0.0).sum()),
    }


def _norm_ratio(observation: Observation, history: Sequence[Observation]) -> float | None:
    if not len(history) or not history[0].update:
        return None
    first = float(flatten(history[0].gradient()).double().norm())
    return float(flatten(observation.gradient()).double().norm()) / first if first else None


def _falling(curve: Sequence[tuple[int, float]]) -> float | None:
    known = [loss for _, loss in curve if math.isfinite(loss)]
    if len(known) < 10:
        return None
    before, last = known[-1 - len(known) // 10], known[-1]
    return (before - last) / abs(before) if before else 0.0


def _replay(
    victim: Victim, observation: Observation, images: Tensor, labels: Tensor, steps: int
) -> Tensors:
    """What the client computed, scaled like `Observation.gradient`, in float64."""
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


def _compare(
    simulated: Mapping[str, Tensor], target: Mapping[str, Tensor], weights: Tensors | None
) -> tuple[float, float | None]:
    """Cosine, and the factor from simulated to target along it; NaN and None for zero vectors."""
    dot = own = other = 0.0
    for name, value in target.items():
        c, s = value.double().cpu(), simulated[name].double().cpu()
        w = weights[name].double().cpu() if weights and name in weights else torch.ones_like(c)
        dot += float((w * c * s).sum())
        own += float((w * s * s).sum())
        other += float((w * c * c).sum())
    if not own or not other:
        return 0.0, None
    return dot / math.sqrt(own * other), dot / own


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
