"""Measure why an attack got no further, on one observation and one result.

These are numbers; `bract.report.findings` says what they mean, and from which value on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import images_in, local_training
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.result import Reconstruction
from bract.attacks.solve.labels import last_layer
from bract.audit.description.truth_check import is_other_optimizer
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.models import tap
from bract.schema.audit import ImageCounts, LayerMatch, Signals, StepCounts
from bract.updates.update import Tensors, flatten

FLAT = 0.01
"""A sigmoid passes less than this share of what reaches it: it is saturated. Its most is 0.25."""

_MANY = 10**9
_RECTIFIERS = (nn.ReLU, nn.ReLU6)


def signals(case: Case, result: Reconstruction) -> Signals:
    """Measure what an attacker can measure; `bract.schema.Signals` says what each is.

    How the images match is what the engine recorded of the blind pick (`Trial.layers`,
    `Trial.scale`).

    Raises
    ------
    BractError
        If no one round holds these images: the attack shared them out among rounds.
    """
    if "assigned" in result.settings:
        raise BractError(
            f"{case.observation.key}: its images were shared out among several rounds",
            code="attack-unsuited",
        )
    case = case.simulating(unroll=result.pick.unroll, max_images=len(result.images))
    observation, history = case.observation, case.known.history
    target, declaration = case.evidence.target, observation.declaration
    steps = observation.law.steps
    one = local_training(case.forward) is None
    negative, unbalanced, unsure = _slope(case)
    return Signals(
        scale=result.pick.scale,
        layers=_layers(target, result),
        zero=float((flatten(target) == 0).double().mean()),
        dead=dead_units(case.target_model, observation, result.images),
        negative=negative,
        unbalanced=unbalanced,
        unsure=unsure,
        images=ImageCounts(declared=images_in(declaration, _MANY), searched=len(result.images)),
        steps=StepCounts(declared=steps, simulated=1 if one else steps),
        optimizer=declaration.optimizer if is_other_optimizer(declaration) else None,
        norm=float(flatten(target).double().norm()),
        norm_ratio=_norm_ratio(observation, history),
        falling=_falling(result.loss_curve),
    )


def dead_units(target_model: TargetModel, observation: Observation, images: Tensor) -> float | None:
    """Share of units that pass no gradient on, whichever of the images comes.

    A rectifier's unit is dead where its output is 0, a sigmoid's where its slope is below `FLAT`;
    of convolutions a whole channel counts as one unit. None where the model has neither as a
    module.
    """
    dead, units = 0, 0
    model, state = target_model.model, target_model.captured(observation)
    rectifiers = tap.named(model, *_RECTIFIERS)

    def look(name: str, output: Tensor) -> None:
        nonlocal dead, units
        value = output.detach()
        passes = value > 0 if name in rectifiers else value * (1 - value) >= FLAT
        alive = passes.flatten(2).any(2).any(0) if passes.dim() > 2 else passes.any(0)
        dead += int((~alive).sum())
        units += alive.numel()

    with tap.leaving(model, [*rectifiers, *tap.named(model, nn.Sigmoid)], look), torch.no_grad():
        functional_call(model, state, (target_model.normalise(images.float()),))
    return dead / units if units else None


def _layers(target: Tensors, result: Reconstruction) -> dict[str, LayerMatch]:
    """Return how each tensor of the target was matched by the blind pick."""
    sizes = {name: float(value.double().square().mean().sqrt()) for name, value in target.items()}
    largest = max(sizes.values())
    return {
        name: LayerMatch(cosine=result.pick.layers.get(name), size=size / largest)
        for name, size in sizes.items()
    }


def _slope(case: Case) -> tuple[int | None, float | None, float | None]:
    """Return ``negative``, ``unbalanced`` and ``unsure`` of the last bias' gradient."""
    try:
        _, name = last_layer(case.target_model)
    except BractError:
        name = None
    slope = case.evidence.target.get(name) if name else None
    if slope is None:
        return None, None, None
    values = slope.double()
    return (
        int((values < 0).sum()),
        float(values.sum().abs() / values.abs().sum().clamp_min(1e-30)),
        float(values.clamp_min(0.0).sum()),
    )


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
