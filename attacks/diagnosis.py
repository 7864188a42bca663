"""Why an attack got no further: what can be measured about one observation and one result.

These are numbers; `bract.server.report.diagnosis` says what they mean, and from which value on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bract.attacks.evidence import Tier
from bract.attacks.labels import last_layer
from bract.attacks.problem import Case, Problem, open_case
from bract.attacks.reconstruction import Reconstruction
from bract.attacks.simulation import BatchGradient, images_in
from bract.attacks.victim import Victim
from bract.errors import BractError
from bract.observation import Observation, Protocol
from bract.update import Tensors, flatten

FLAT = 0.01
"""A sigmoid passes less than this share of what reaches it: it is saturated. Its most is 0.25."""

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
        and ``steps``: declared, and searched or simulated. ``optimizer``: the declared one, where
        the attack simulates plain SGD in its place. ``norm`` of the evidence, and ``norm_ratio``
        to the client's first captured one. ``falling``: share by which the loss fell in the last
        tenth of the search.
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
        "optimizer": protocol.optimizer if is_other_optimizer(protocol) else None,
        "norm": float(flatten(target).double().norm()),
        "norm_ratio": _norm_ratio(observation, history),
        "falling": _falling(result.loss_curve),
    }


def is_other_optimizer(protocol: Protocol) -> bool:
    """Whether an update is the work of an optimizer that no forward model simulates."""
    return protocol.algorithm == "fedavg" and protocol.optimizer != "sgd"


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


def compare(
    simulated: Mapping[str, Tensor], target: Mapping[str, Tensor], weights: Tensors | None
) -> tuple[float, float | None]:
    """Cosine, and the factor from simulated to target along it; 0 and None for zero vectors."""
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


def _match(case: Case, result: Reconstruction) -> dict[str, Any]:
    target = case.evidence.target
    largest = max(float(v.double().square().mean().sqrt()) for v in target.values())
    layers: dict[str, dict[str, float | None]] = {
        name: {"cosine": None, "size": float(v.double().square().mean().sqrt()) / largest}
        for name, v in target.items()
    }
    lane = (case, int(result.settings.get("restart", 0)))
    problem = Problem.stack(
        [lane], seed=result.seed, device=torch.device("cpu"), dtype=torch.float64
    )
    if problem.unknowns():
        return {"scale": None, "layers": layers}
    simulated = problem.simulate(
        result.images[None].double(), result.label_probabilities[None].double(), {}
    )
    flat = {name: value.detach()[0] for name, value in simulated.items()}
    for name, found in layers.items():
        found["cosine"] = compare({name: flat[name]}, {name: target[name]}, None)[0]
    return {"scale": compare(flat, target, case.evidence.weights)[1], "layers": layers}


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
