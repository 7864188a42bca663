"""Long local training, simulated along the line between the sent and the returned model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bract.attacks.problem.client_model import (
    ForwardModel,
    local_training,
    loss_gradient,
    step_settings,
)
from bract.attacks.problem.epoch_orders import batch_of, steps_per_epoch
from bract.attacks.problem.step_rules import BETAS, RULES, StepSettings, is_decoupled
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.updates.momentum import mean_velocity, response
from bract.updates.step_law import LINEAR, StepLaw
from bract.updates.update import Tensors

MOVED = "training_path.moved."
"""Among the buffers, before a parameter's name: how far local training moved it."""

PLACE = "training_path.place"
"""Among the unknowns: where on the line the gradients are taken, ``(L,)``, as the logit of its way
from the least to the largest of `_PLACES` times `TrainingPath.share`."""

_PLACES = (0.5, 1.2)

WEIGHTS = "training_path.weights"
"""Among the unknowns: what each image counts, ``(L, B)``, as logits of its share."""

_ALIKE = 0.1
"""Most that the mean step under a constant gradient may differ from one of plain SGD."""

_SHOWN = 1e-3
"""Least distance, in gradients times the rate, that steps must lead to be told from standing still:
one step leads 1, and steps that are held where their gradient is balanced a quarter or more."""

_REPLAYED = 8
"""Most steps of Adam whose directions are averaged, if an epoch has no more."""


@dataclass(frozen=True, kw_only=True)
class TrainingPath(StepSettings, ForwardModel):
    """The mean direction of a client's steps, from all images' gradients where training went by.

    The server knows both ends of the client's training, ``w_0`` and ``w_K``, and so about where it
    was in between: at ``w_0 + t (w_K - w_0)``. There images count alike, in whatever batches and
    order they were taken, so nothing about the order is searched, and all epochs share one set of
    images (unlike Dimitrov et al., TMLR 2022: they unroll every step and tie one set of images an
    epoch together). The cost is that of one batch of all images instead of one gradient a step.
    What it leaves out is the bend of the path and how a step's batch differs from the whole, of the
    order of learning rate times curvature; the mean gradient at ``w_0`` leaves out the whole
    motion. A smaller last batch makes its images count more, and a part of an epoch the images that
    it took: what each counts is then found with the images (`WEIGHTS`).

    With momentum the mean direction is a multiple of the gradient, and the gradients of early steps
    count more, so that the place is nearer to ``w_0``; what FedProx and weight decay pull back
    counts less than what came late, so that it is nearer to ``w_K``. Both follow from the steps as
    they would go under a constant gradient (`bract.updates.momentum.response`). Adam divides by
    the root of the batches' mean square, in which the batch counts: the gradients of one epoch's
    batches, all at the middle of the line, go through its recursion, epoch after epoch.

    Attributes
    ----------
    steps, batch_size
        As the protocol declares them, and what `StepSettings` holds; plain SGD needs the optimizer
        alone.
    proximal_mu, weight_decay, lr
        As declared. FedProx pulls a step back to ``w_0`` and decay to zero; of SGD
        `Observation.gradient` took the part of ``w_0`` off.
    uneven
        Number of images whose `WEIGHTS` are found; 0 where all count alike.
    only
        Names of the parameters whose direction is simulated; all where there are none.
    place_searched
        Whether `PLACE` is found with the images. Large steps go most of the way at first, and the
        gradients along it are then those of a place before the middle.
    """

    steps: int = 1
    batch_size: int = 1
    proximal_mu: float = 0.0
    weight_decay: float = 0.0
    lr: float = 0.0
    uneven: int = 0
    only: tuple[str, ...] = ()
    place_searched: bool = False

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Return `PLACE` at `share` and equal `WEIGHTS`, if they are searched."""
        del target_model, generators
        low, high = _PLACES
        start = torch.logit(torch.tensor((1.0 - low) / (high - low)))
        place = {PLACE: start.repeat(trials)} if self.place_searched else {}
        return place | ({WEIGHTS: torch.zeros(trials, self.uneven)} if self.uneven else {})

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return the mean direction of the steps."""
        state = {
            name: value
            for name, value in (buffers | unknowns).items()
            if not name.startswith(MOVED) and name not in (PLACE, WEIGHTS)
        }
        here = _at(_place(unknowns, self.share), parameters, buffers)
        if self.optimizer in LINEAR:
            counts = unknowns.get(WEIGHTS)
            if counts is not None:
                counts = self.uneven * counts.softmax(dim=1)
            found = loss_gradient(
                target_model, here, state, inputs, labels, only=self.only, weights=counts
            )
            kept = self._kept
            return {
                n: self.gain * g + kept * parameters[n] if kept else self.gain * g
                for n, g in found.items()
            }
        count = inputs.shape[1]
        size = min(self.batch_size, count)
        taken = [batch_of(step, count, size) for step in range(steps_per_epoch(count, size))]
        gradients = [
            loss_gradient(
                target_model,
                here,
                state,
                inputs[:, t.start : t.stop],
                labels[:, t.start : t.stop],
                only=self.only,
            )
            for t in taken
        ]
        return self.mean_direction(gradients, parameters, buffers)

    def _pulled(self, gradient: Tensors, here: Tensors, start: Tensors) -> Tensors:
        """Add what a step of Adam takes of the parameters themselves."""
        back, decay = self.proximal_mu, self.weight_decay
        if is_decoupled(self.optimizer):
            # What AdamW decays is small beside its steps.
            decay = 0.0
        if not back and not decay:
            return gradient
        return {n: g + (back + decay) * here[n] - back * start[n] for n, g in gradient.items()}

    def mean_direction(self, gradients: list[Tensors], start: Tensors, buffers: Tensors) -> Tensors:
        """Return the mean direction of steps that follow an epoch's gradients in turn."""
        rule = self.rule()
        steps = min(self.steps, max(_REPLAYED, len(gradients)))
        total: Tensors = {}
        for step in range(steps):
            here = _at(step / steps, start, buffers)
            direction = rule(self._pulled(gradients[step % len(gradients)], here, start))
            total = {n: total[n] + d for n, d in direction.items()} if total else direction
        return {name: value / steps for name, value in total.items()}

    @property
    def steps_alike(self) -> bool:
        """Return whether early and late steps add about as much to where training ends."""
        return abs(self.gain - 1.0) < _ALIKE

    def mean_gradient(self, direction: Tensor, start: Tensor) -> Tensor:
        """Return the mean gradient behind SGD's mean direction of one parameter."""
        if self.optimizer not in LINEAR:
            return direction
        return (direction - self._kept * start) / self.gain

    @property
    def _kept(self) -> float:
        """Return how often what decays of ``w_0`` is in SGD's mean direction, less what was taken
        off.
        """
        if not self.weight_decay:
            return 0.0
        return self.weight_decay * (self.gain - mean_velocity(self.momentum, self.steps))

    @property
    def gain(self) -> float:
        """Mean direction of a constant gradient under SGD, as its multiple; 1 elsewhere."""
        return self._response[0]

    @property
    def share(self) -> float:
        """Return where the gradients are taken, as a share of the way: their mean place in the
        update.

        Of plain SGD it is the middle, which half a step before it would not tell from.
        """
        return self._response[1]

    @property
    def _response(self) -> tuple[float, float]:
        pull = self.lr * (self.proximal_mu + self.weight_decay)
        if self.optimizer not in LINEAR or not (self.momentum or pull):
            return 1.0, 0.5
        return response(self.momentum, pull, self.steps)


def mean_gradient(forward: ForwardModel, direction: Tensor, start: Tensor) -> Tensor:
    """Return the mean gradient behind the mean direction of a client's steps, of one parameter.

    Parameters
    ----------
    direction, start
        What is matched, and what was sent.
    """
    if isinstance(forward, TrainingPath):
        return forward.mean_gradient(direction, start)
    training = local_training(forward)
    if training is None or training.optimizer not in LINEAR:
        return direction
    gain = mean_velocity(training.momentum, training.steps)
    if training.optimizer == "nesterov":
        gain = 1.0 + training.momentum * gain
    return direction / gain


def _place(unknowns: Tensors, share: float) -> float | Tensor:
    """Return the place on the line, one for all trials or ``(L,)``."""
    if PLACE not in unknowns:
        return share
    low, high = _PLACES
    return share * (low + (high - low) * unknowns[PLACE].sigmoid())


def _at(place: float | Tensor, start: Tensors, buffers: Tensors) -> Tensors:
    """Return the parameters at a place on the line."""

    def times(moved: Tensor) -> Tensor:
        if isinstance(place, float):
            return place * moved
        return place.view(-1, *[1] * (moved.dim() - 1)) * moved

    return {n: value - times(buffers[MOVED + n].to(value)) for n, value in start.items()}


def training_path(observation: Observation, images: int) -> TrainingPath:
    """Return the simulation of a client that `knows_path` found to be one of a known path.

    Raises
    ------
    BractError
        If what is declared pulls steps back further than they came.
    """
    p, steps = observation.declaration, observation.law.counted
    pull = (p.proximal_mu or 0.0) + p.weight_decay
    size = min(p.batch_size or images, images)
    if p.optimizer not in LINEAR:
        return TrainingPath(
            steps=steps,
            batch_size=size,
            proximal_mu=p.proximal_mu or 0.0,
            weight_decay=p.weight_decay,
            **_even_settings(p),
        )
    found = TrainingPath(uneven=images if _uneven(p, images) else 0)
    if p.momentum or pull:
        found = replace(
            found,
            steps=steps,
            batch_size=size,
            momentum=p.momentum,
            proximal_mu=p.proximal_mu or 0.0,
            weight_decay=p.weight_decay,
            lr=(p.lr or 0.0) if pull else 0.0,
        )
    # The bound of the heavy ball on a quadratic; near it steps may end behind where they began.
    if found.lr * pull >= 2.0 * (1.0 + p.momentum) or found.gain * steps < _SHOWN:
        raise BractError(
            f"{observation.key}: what pulls its steps back overshoots, so that {steps} of "
            f"them show no mean gradient: a learning rate of {p.lr:g}, a momentum of "
            f"{p.momentum:g}, a proximal_mu of {p.proximal_mu or 0.0:g} and a weight_decay of "
            f"{p.weight_decay:g}; correct the declaration",
            code="declaration-wrong",
        )
    return found


def _even_settings(declaration: ClientDeclaration) -> dict[str, Any]:
    """Return what an optimizer of Adam's kind averages by, with the mean of what steps have."""
    found = step_settings(declaration)
    momenta = found.pop("momenta")
    if momenta and declaration.optimizer != "rmsprop":
        mean = sum(momenta) / len(momenta)
        found["betas"] = (mean, (declaration.betas or BETAS)[1])
    return found


def _uneven(declaration: ClientDeclaration, images: int) -> bool:
    """Return whether some images counted more than others, in smaller batches or a part of an
    epoch.
    """
    p = declaration
    if p.num_examples != images or p.batch_size is None or p.batch_size >= images:
        return False
    part = StepLaw.of(p).counted % steps_per_epoch(images, p.batch_size)
    return bool(images % p.batch_size or part)


def knows_steps(observation: Observation) -> bool:
    """Return whether the update is where simulated steps ended, undefended."""
    law, p = observation.law, observation.declaration
    known = law.averaging and law.scaled
    return known and law.optimizer in RULES and not p.defenses


def knows_path(observation: Observation) -> bool:
    """Return whether it is where several ended."""
    return knows_steps(observation) and not observation.law.one_step


def moved(observation: Observation) -> Tensors:
    """Return how far each parameter went, for the buffers of a problem."""
    return {MOVED + name: observation.update[name] for name in observation.parameters}
