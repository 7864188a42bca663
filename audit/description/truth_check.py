"""Repeat the client's computation on its true images and compare it with the capture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import BatchGradient, ForwardModel, LocalTraining
from bract.attacks.problem.dropout import read_dropout
from bract.attacks.problem.objectives import agreement, factor
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.step_rules import RULES
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.models.keylock import key_locks
from bract.models.losses import label_rows
from bract.schema.audit import TruthCheck
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

ROUNDING = 1e-6
"""Distance from a cosine of 1 up to which float32 explains the difference."""

RANDOM = 1e-6
"""Distance of two simulations from which on the model draws; rounding alone leaves far less."""

OFF = 1e-3
"""Relative difference in length up to which a single step is of the declared learning rate."""

REPLAYED_STEPS = 64
"""Most local steps that are repeated."""

Term = Literal["proximal_mu", "momentum", "weight_decay", "lr", "dropout"]

MOST: dict[Term, float] = {
    "proximal_mu": math.inf,
    "momentum": 0.999,
    "weight_decay": math.inf,
    "lr": math.inf,
    "dropout": 0.99,
}
"""Terms of a local step whose value is sought where an update does not fit, and their bounds."""

FIRST_STEP = 0.1
"""From the declared value of a term to the second one that is tried."""

RATES = (0.1, 0.2, 0.5, 2.0, 5.0, 10.0)
"""Learning rates that are tried first, as multiples of the declared one: usual steps of schedules.
"""

SECANTS = 8
"""Most values of a term that are tried."""


def truth_check(case: Case, images: Tensor, labels: Tensor) -> TruthCheck | None:
    """Repeat the client's computation on its true images and compare it with the evidence.

    No attacker can do this. Without a defense it says whether the declared context (normalisation,
    mode of batch normalisation, learning rate, proximal term) is that of the client; against one,
    how far the update was distorted (oblivious) or how well it was recovered (adaptive). Where the
    tier's attacker simulates the defense, the same simulation stands for the client, with what the
    evidence says of its inside.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, in order of first use; of soft labels
        probabilities ``(N, classes)``.

    Returns
    -------
    TruthCheck or None
        ``cosine``, ``scale`` and ``exact`` (False where the order of later epochs, or what
        dropout left out, is not known); where the match or the scale is poor, ``tried``: the cosine
        in other contexts, by name. None where the client cannot be repeated: an optimizer that is
        not simulated, more than `REPLAYED_STEPS` steps, or part of the model, or its noise, kept at
        the client.
    """
    made = repeat_client(case, images, labels)
    if made is None:
        return None
    observation, p, steps = case.observation, case.observation.declaration, made.steps
    case, images, labels, target = made.case, made.images, made.labels, made.target
    repeated, exact, plain = made.simulated, made.exact, made.plain
    cosine, scale = made.compared
    tried: dict[str, float | None] = {}
    if plain and not cosine >= 1.0 - ROUNDING:
        for name, other in _other_contexts(case.target_model, observation).items():
            try:
                again = _repeat(
                    target_model_of(other), other, images, labels, steps, case.law.decayed
                )
            except BractError:
                continue
            tried[name] = compare(again, target, case.evidence.weights)[0]
        for term in _terms(p, steps, len(images)) if exact else ():
            value, again = _fitting(term, case, repeated, target, images, labels, steps)
            tried[f"{term}: {value:.3g}"] = compare(again, target, case.evidence.weights)[0]
    elif (
        plain
        and not p.defenses
        and observation.law.averaging
        and p.lr
        and scale
        and abs(scale - 1.0) > OFF
        and steps == 1
    ):
        # The length of a single step is its learning rate's: the direction stays.
        tried[f"lr: {p.lr * scale:.3g}"] = cosine
    return TruthCheck(cosine=cosine, scale=scale, exact=exact, tried=tried)


@dataclass(frozen=True)
class Repeated:
    """A client's computation on its true examples, and what was captured of it.

    Attributes
    ----------
    simulated, target
        In float64, scaled like `Observation.gradient`; the evidence is read in favour of the truth.
    exact
        False where the order of later epochs, or what dropout left out, is not known.
    plain
        Whether no defense is simulated, so that terms of the local steps can be changed.
    images, labels
        Those that the steps take, in order of first use.
    """

    case: Case
    steps: int
    images: Tensor
    labels: Tensor
    simulated: Tensors
    target: Tensors
    exact: bool
    plain: bool

    @property
    def compared(self) -> tuple[float, float | None]:
        """Cosine, and the factor from simulated to captured."""
        return compare(self.simulated, self.target, self.case.evidence.weights)


def repeat_client(case: Case, images: Tensor, labels: Tensor) -> Repeated | None:
    """Repeat the client's computation on its true images, as its description has it.

    Parameters and None as in `truth_check`.
    """
    observation = case.observation
    p = observation.declaration
    steps = observation.law.steps
    if steps is None or steps > REPLAYED_STEPS or (steps > 1 and not p.lr):
        return None
    if is_other_optimizer(p):
        return None
    case = case.simulating(max_images=len(images), unroll=REPLAYED_STEPS)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    if key_locks(case.target_model.model) or problem.unknowns():
        return None
    taken = min(len(images), steps * (p.batch_size or len(images)))
    images, labels = images[:taken], labels[:taken]
    exact = _is_order_known(p, len(images), steps)
    exact = exact and read_dropout(observation, case.target_model).readable
    plain = isinstance(case.forward, BatchGradient | LocalTraining)
    if plain:
        repeated = _repeat(case.target_model, observation, images, labels, steps, case.law.decayed)
    else:
        repeated = _simulate(problem, case, images, labels)
    reading = problem.reading({name: value[None] for name, value in repeated.items()})
    target = {name: value[0] for name, value in reading.items()}
    return Repeated(case, steps, images, labels, repeated, target, exact, plain)


def _is_order_known(p: ClientDeclaration, kept: int, steps: int) -> bool:
    """Return whether what each step takes is known: in one pass, or where a batch holds all.

    Inputs that are augmented anew in later passes are not.
    """
    batch = p.batch_size or kept
    if steps <= math.ceil(min(kept, steps * batch) / batch):
        return True
    return batch >= kept and p.num_examples in (None, kept) and not p.augmentation


def draws_at_random(made: Repeated) -> bool:
    """Return whether the client's model draws what no upload shows, such as masks of dropout.

    Layers of dropout are simulated in evaluation mode; what other code draws is seen where a
    second simulation gives another update.
    """
    p, model = made.case.observation.declaration, made.case.target_model
    rates = [m.p for m in model.model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    masks = read_dropout(made.case.observation, model).masks
    if any(rates) and not masks and p.dropout != 0.0 and model.declaration.norm_mode == "train":
        return True
    if not made.plain:
        return False
    again = _repeat(
        model, made.case.observation, made.images, made.labels, made.steps, made.case.law.decayed
    )
    cosine, scale = compare(again, made.simulated, None)
    return scale is not None and (cosine < 1.0 - RANDOM or abs(scale - 1.0) > RANDOM)


def is_other_optimizer(declaration: ClientDeclaration) -> bool:
    """Return whether an update is the work of an optimizer that no forward model simulates."""
    return StepLaw.of(declaration).averaging and declaration.optimizer not in RULES


def truth_match(case: Case, images: Tensor, labels: Tensor) -> float | None:
    """Return the cosine of the update that an attack simulates at the true images.

    The simulation is the attack's own, with its mean over local steps where it unrolls none. Where
    it matches better here than at what the attack found, the search failed; else what is simulated
    did, or other images explain the update as well.

    Parameters
    ----------
    case
        As the attack simulated it (`Case.simulating`).
    images, labels
        As in `truth_check`.

    Returns
    -------
    float or None
        None where the attack looked for another number of images, or took part of the client for
        unknown.
    """
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    if case.images != len(images) or key_locks(case.target_model.model) or problem.unknowns():
        return None
    simulated = _simulate(problem, case, images, labels)
    reading = problem.reading({name: value[None] for name, value in simulated.items()})
    target = {name: value[0] for name, value in reading.items()}
    return compare(simulated, target, case.evidence.weights)[0]


def _terms(p: ClientDeclaration, steps: int, images: int) -> list[Term]:
    """Return the terms of a local step that such an update shows."""
    one: list[Term] = ["dropout"] if steps == images == 1 and not p.defenses else []
    law = StepLaw.of(p)
    if not law.averaging:
        return one
    several: list[Term] = ["proximal_mu"] if steps > 1 else []
    if steps > 1 and p.optimizer == "sgd":
        several.append("momentum")
    rate: list[Term] = ["lr"] if p.lr else []
    return [*one, *several, "weight_decay", *rate]


def _simulate(problem: Problem, case: Case, images: Tensor, labels: Tensor) -> Tensors:
    """Simulate the client with the tier's own forward model."""
    loss = problem.target_model.loss
    rows = label_rows(labels, problem.classes, loss)[None, : case.images].double()
    simulated = problem.simulate(images[None, : case.images].double(), rows, {})
    return {name: value.detach()[0] for name, value in simulated.items()}


def compare(
    simulated: Tensors, target: Tensors, weights: Tensors | None
) -> tuple[float, float | None]:
    """Cosine, and the factor from simulated to target along it; 0 and None for zero vectors."""
    one, other = ({n: v[None] for n, v in tensors.items()} for tensors in (simulated, target))
    trusts = weights and {n: v[None].double() for n, v in weights.items()}
    scale = float(factor(one, other, trusts))
    if math.isnan(scale):
        return 0.0, None
    return float(agreement(one, other, trusts)[0]), scale


def _repeat(
    target_model: TargetModel,
    observation: Observation,
    images: Tensor,
    labels: Tensor,
    steps: int,
    without: float,
) -> Tensors:
    """Simulate the client as an attacker would, in float64, scaled like `Observation.gradient`.

    Parameters
    ----------
    without
        How often what it is compared with lacks the sent parameters: by its own declaration, not
        by one that is tried (`bract.updates.step_law.StepLaw.decayed`).
    """
    p = observation.declaration
    client: ForwardModel = BatchGradient()
    if observation.law.averaging:
        client = LocalTraining.of(p, images=len(images), steps=steps, without=without)
    masks = read_dropout(observation, target_model).masks
    held = {n: v for n, v in observation.buffers.items() if n in target_model.buffer_names} | masks
    made = client(
        target_model,
        {n: observation.parameters[n].double()[None] for n in target_model.parameter_names},
        {n: (v.double() if v.is_floating_point() else v)[None] for n, v in held.items()},
        target_model.normalise(images.double())[None],
        label_rows(labels, p.classes or 0, target_model.loss).double()[None],
        {},
    )
    return {name: value.detach()[0] for name, value in made.items()}


def _fitting(
    name: Term,
    case: Case,
    repeated: Tensors,
    target: Tensors,
    images: Tensor,
    labels: Tensor,
    steps: int,
) -> tuple[float, Tensors]:
    """Return the value of a term that fits best, by the secant method, and the update it gives.

    Parameters
    ----------
    name
        Field of the declaration.
    repeated
        What the declared value gives.
    """
    p = case.observation.declaration

    def given(value: float) -> Tensors:
        change: dict[str, Any] = {name: value}
        other = replace(case.observation, declaration=replace(p, **change))
        # What it is compared with was scaled by the declared rate.
        ratio = value / p.lr if name == "lr" and p.lr else 1.0
        made = _repeat(case.target_model, other, images, labels, steps, case.law.decayed / ratio)
        return {n: v * ratio for n, v in made.items()}

    def distance(made: Tensors) -> float:
        square = sum(float((target[n] - v).square().sum()) for n, v in made.items())
        return square if math.isfinite(square) else math.inf

    before, found = getattr(p, name) or 0.0, repeated
    step, least = FIRST_STEP, 0.0
    if name == "lr":
        # Over several steps a far rate is found from a near one alone.
        starts = {rate * before: given(rate * before) for rate in RATES} | {before: repeated}
        before = min(starts, key=lambda rate: distance(starts[rate]))
        found, step, least = starts[before], FIRST_STEP * before / 10.0, before / 1000.0
    elif name == "dropout" and not before:
        # From no mask to one the update jumps; the rate is a matter of masks alone.
        before, found = FIRST_STEP, given(FIRST_STEP)
    value = before + (step if before + step < MOST[name] else -step)
    again = found
    for _ in range(SECANTS):
        value = min(max(value, least), MOST[name])
        if value == before:
            break
        again = given(value)
        slope = {n: (again[n] - found[n]) / (value - before) for n in again}
        square = sum(float(v.square().sum()) for v in slope.values())
        missing = sum(float((slope[n] * (target[n] - again[n])).sum()) for n in slope)
        before, found = value, again
        if not square > 0.0:
            break
        value += missing / square
    return before, again


def _other_contexts(target_model: TargetModel, observation: Observation) -> dict[str, Observation]:
    p = observation.declaration
    changes: dict[str, dict[str, Any]] = {}
    if p.mean is not None or p.std is not None:
        changes["pixels without normalisation"] = {"mean": None, "std": None}
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in target_model.model.modules()):
        other = "eval" if p.norm_mode == "train" else "train"
        changes[f"norm_mode: {other}"] = {"norm_mode": other}
    others = {"relu": "sigmoid", "sigmoid": "relu"}
    if p.model and ":" not in p.model and p.activation in others:
        changes[f"activation: {others[p.activation]}"] = {"activation": others[p.activation]}
    return {
        name: replace(observation, declaration=replace(p, **change))
        for name, change in changes.items()
    }
