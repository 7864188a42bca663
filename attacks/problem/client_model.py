"""What a client would have sent for given images: the forward models of gradient matching."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bract.attacks.problem.dropout import masked, split_masks
from bract.attacks.problem.epoch_orders import Order, batch_of, shuffle, steps_per_epoch
from bract.attacks.problem.step_rules import RULES, StepSettings, is_decoupled
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.uncompiled import gradient_at
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

ORDERS = "local_training.orders"
"""Among the buffers: the order of the images in every epoch, int64 ``(L, epochs, B)``."""

CLIPPED = 1e-6
"""Added to the norm by `torch.nn.utils.clip_grad_norm_`, so that it divides by no zero."""


class ForwardModel(typing.Protocol):
    """Simulate a client.

    An adaptive attacker supplies another one, for example with the defense applied to the simulated
    tensors. Forward models are hashable; observations whose models are equal run as one batch.
    ``unknowns`` are further variables to find with the images, for example the outputs of a
    key-lock; they start at the values of `unknowns`, by default none.
    """

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Return starting values ``(L, ...)`` of what must be found besides images and labels."""
        del target_model, trials, generators
        return {}

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return the simulated update, scaled like `Observation.gradient`, ``(L, ...)`` by name.

        Parameters
        ----------
        inputs
            ``(L, B, C, H, W)``, normalised.
        labels
            ``(L, B, classes)`` probabilities; ``(L, B, 1)`` values where one output is a number;
            ``(L, B, T * tags)`` where tokens have labels.
        """


@dataclass(frozen=True)
class BatchGradient(ForwardModel):
    """The gradient of one batch: FedSGD, or one local step of plain SGD."""

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return the gradient of the mean loss."""
        return loss_gradient(target_model, parameters, buffers | unknowns, inputs, labels)


@dataclass(frozen=True, kw_only=True)
class LocalTraining(StepSettings, ForwardModel):
    """Several local steps, unrolled: matches ``(w_0 - w_K) / (lr * steps)``.

    Under FedProx (Li et al. 2020) a step follows the gradient plus ``proximal_mu (w - w_0)``, with
    weight decay plus ``weight_decay w``.

    Every epoch goes through all images once, ``batch_size`` at a step; the last step of an epoch
    takes what is left. In the first epoch the images are in order, since the search decides which
    image is where. Later epochs are in the order that the buffers hold as `ORDERS`, by default the
    same one; shuffling is not declared, so restarts try different orders
    (`bract.attacks.problem.epoch_orders`).

    Attributes
    ----------
    steps, batch_size, lr, proximal_mu, weight_decay
        As the protocol declares them, and what `StepSettings` holds.
    lr_factors, max_grad_norm, max_grad_value
        As the protocol declares them. What is clipped is the gradient with the proximal term,
        before weight decay, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do in a
        loop.
    without
        How often ``w_0`` is taken from the scaled difference, as `Observation.gradient` does.
    frozen
        Names of parameters that no step moves.
    """

    steps: int
    batch_size: int
    lr: float
    proximal_mu: float = 0.0
    weight_decay: float = 0.0
    without: float = 0.0
    frozen: tuple[str, ...] = ()
    lr_factors: tuple[float, ...] = ()
    max_grad_norm: float | None = None
    max_grad_value: float | None = None

    @classmethod
    def of(
        cls, declaration: ClientDeclaration, *, images: int, steps: int, **others: Any
    ) -> LocalTraining:
        """Return the steps that a protocol declares, of an update of ``images``.

        Parameters
        ----------
        steps
            Those that are simulated; as many as declared, or fewer.
        others
            Fields that no protocol declares: ``without`` and ``frozen``.

        Raises
        ------
        BractError
            If the declared factors or momenta are not of as many steps.
        """
        p = declaration
        declared = StepLaw.of(p).steps
        for name, each in (("lr_factors", p.lr_factors), ("momenta", p.momenta)):
            if each and declared not in (None, len(each)):
                raise BractError(
                    f"{name} declares values of {len(each)} steps, and local_steps is {declared}; "
                    "give one a step",
                    code="declaration-wrong",
                )
        return cls(
            steps=steps,
            batch_size=min(p.batch_size or images, images),
            lr=p.lr or 1.0,
            proximal_mu=p.proximal_mu or 0.0,
            weight_decay=p.weight_decay,
            lr_factors=p.lr_factors,
            max_grad_norm=p.max_grad_norm,
            max_grad_value=p.max_grad_value,
            **step_settings(p),
            **others,
        )

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Train from ``parameters`` and return the scaled difference, differentiably."""
        batch, state = self.batches(inputs, labels, buffers | unknowns)
        moving = [name for name in parameters if name not in self.frozen]

        def gradient(step: int, current: Tensors) -> Tensors:
            return loss_gradient(target_model, current, state, *batch(step), only=moving)

        return self.mean_direction(parameters, self.trajectory(parameters, gradient))

    def trajectory(
        self,
        start: Tensors,
        gradient: Callable[[int, Tensors], Tensors],
        rates: Mapping[str, float | Tensor] | None = None,
        pulled: Collection[str] | None = None,
    ) -> Tensors:
        """Return where the steps end, differentiably.

        Parameters
        ----------
        gradient
            Maps the number of the step, from 0, and the current parameters to a gradient.
        rates
            What multiplies the learning rate, by name, a number or ``(L, 1, ...)``; 1 where a name
            is left out.
        pulled
            Names that the proximal term pulls back to ``start``, and that decay; None for all.
        """
        current = dict(start)
        rule = self.rule()
        rates = rates or {}
        for step in range(self.steps):
            direction = gradient(step, current)
            if self.proximal_mu and step:
                direction = {
                    name: g + self.proximal_mu * (current[name] - start[name])
                    if pulled is None or name in pulled
                    else g
                    for name, g in direction.items()
                }
            direction = self._clipped(direction)
            if not is_decoupled(self.optimizer):
                direction = self._decaying(direction, current, pulled)
            direction = rule(direction)
            if is_decoupled(self.optimizer):
                direction = self._decaying(direction, current, pulled)
            lr = self.lr * (self.lr_factors[step] if self.lr_factors else 1.0)
            current = current | {
                name: current[name] - lr * rates.get(name, 1.0) * g for name, g in direction.items()
            }
        return current

    def _clipped(self, gradient: Tensors) -> Tensors:
        """Clip every value, or the whole gradient of each trial to its largest norm."""
        if self.max_grad_value is not None:
            most = self.max_grad_value
            return {n: g.clamp(-most, most) for n, g in gradient.items()}
        if self.max_grad_norm is None:
            return gradient
        squares = [g.square().flatten(1).sum(dim=1) for g in gradient.values()]
        norm = torch.stack(squares).sum(dim=0).clamp_min(1e-38).sqrt()
        factor = (self.max_grad_norm / (norm + CLIPPED)).clamp_max(1.0)
        return {n: factor.view(-1, *[1] * (g.dim() - 1)) * g for n, g in gradient.items()}

    def _decaying(
        self, direction: Tensors, current: Tensors, pulled: Collection[str] | None
    ) -> Tensors:
        """Add what weight decay takes of the parameters."""
        if not self.weight_decay:
            return direction
        return {
            name: g + self.weight_decay * current[name] if pulled is None or name in pulled else g
            for name, g in direction.items()
        }

    def mean_direction(self, start: Tensors, end: Tensors) -> Tensors:
        """Return ``(start - end) / (lr * steps)`` for every name of ``start``, less the decay."""
        scale = 1.0 / (self.lr * self.steps)
        found = {name: (value - end[name]) * scale for name, value in start.items()}
        if self.without:
            return {
                name: value if name in self.frozen else value - self.without * start[name]
                for name, value in found.items()
            }
        return found

    def positions(self, step: int, count: int, order: Order | None = None) -> list[int]:
        """Positions of the images, of ``count``, that step number ``step`` (from 0) takes."""
        taken = batch_of(step, count, self.batch_size)
        if order is None:
            return list(taken)
        row = order[step // steps_per_epoch(count, self.batch_size)]
        return [row[position] for position in taken]

    def order(self, count: int, choice: int) -> tuple[Order | None, int]:
        """An order of ``count`` images for every epoch; see
        `bract.attacks.problem.epoch_orders.shuffle`.

        None where nothing is open: within one epoch, or with all images in every batch.
        """
        per_epoch = steps_per_epoch(count, self.batch_size)
        if per_epoch == 1 or self.steps <= per_epoch:
            return None, choice
        return shuffle(count, self.batch_size, self.steps, choice)

    def batches(
        self, inputs: Tensor, labels: Tensor, state: Tensors
    ) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Tensors]:
        """Return what each step takes, and the state without the orders of the images."""
        count = inputs.shape[1]
        left = {name: value for name, value in state.items() if name != ORDERS}
        orders = state.get(ORDERS)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            taken = batch_of(step, count, self.batch_size)
            if orders is None:
                return inputs[:, taken.start : taken.stop], labels[:, taken.start : taken.stop]
            row = orders[:, step // steps_per_epoch(count, self.batch_size)]
            trials = torch.arange(len(inputs), device=inputs.device)[:, None]
            pick = row[:, taken.start : taken.stop]
            return inputs[trials, pick], labels[trials, pick]

        return batch, left


@dataclass(frozen=True, kw_only=True)
class DefendedForward(ForwardModel):
    """A forward model of a client whose update is changed before it is sent."""

    client: ForwardModel

    @property
    def only_shortens(self) -> bool:
        """Return whether the defense, but for noise, changes nothing of an update but its
        length.
        """
        return False

    @property
    def training(self) -> LocalTraining | None:
        """The local steps that are unrolled; None for a gradient."""
        return local_training(self.client)

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Return those of the client."""
        return self.client.unknowns(target_model, trials, generators)


def loss_gradient(
    target_model: TargetModel,
    parameters: Tensors,
    buffers: Tensors,
    inputs: Tensor,
    labels: Tensor,
    *,
    auxiliary: bool = False,
    only: Sequence[str] = (),
    weights: Tensor | None = None,
) -> Tensors:
    """Gradient of the mean loss under soft labels, each trial by its own parameters.

    It composes with autograd and with every transform of `torch.func`. Trials do not mix, so the
    gradient of the sum over trials holds each trial's own gradient.

    Parameters
    ----------
    buffers
        With the masks of the client's dropout, where they were read
        (`bract.attacks.problem.dropout.MASK`).
    auxiliary
        Add what the model itself adds to a client's loss (`bract.models.own_loss.auxiliary_loss`).
    only
        Names of the parameters whose gradients are wanted; all where there are none.
    weights
        What each image's loss counts, ``(L, B)``; 1 where None.
    """

    masks, state = split_masks(buffers)

    target_model.follow(parameters)

    def total_loss(at: Tensors) -> Tensor:
        logits, added = target_model.outputs(masked(parameters | at, masks), state, inputs)
        each = target_model.loss.each(logits, labels)
        loss = (each if weights is None else weights * each).mean(dim=-1)
        return (loss + added).sum() if auxiliary else loss.sum()

    beside = [*parameters.values(), *buffers.values(), inputs, labels]
    beside += [] if weights is None else [weights]
    return gradient_at(total_loss, {n: parameters[n] for n in only or parameters}, beside)


def step_settings(declaration: ClientDeclaration) -> dict[str, Any]:
    """Return the fields of `StepSettings` that a protocol declares."""
    return {field.name: getattr(declaration, field.name) for field in fields(StepSettings)}


def local_training(forward: ForwardModel) -> LocalTraining | None:
    """Return the local steps that a forward model unrolls, also as a part of another one."""
    found = forward if isinstance(forward, LocalTraining) else getattr(forward, "training", None)
    return found if isinstance(found, LocalTraining) else None


def images_in(declaration: ClientDeclaration, limit: int) -> int:
    """Return the number of images an update was computed from, at most ``limit``."""
    batch, examples = declaration.batch_size, declaration.num_examples
    if batch is None and examples is None:
        raise BractError(
            "the protocol declares neither batch_size nor num_examples; "
            "an attack must know how many images to look for",
            code="declaration-lacks",
        )
    law = StepLaw.of(declaration)
    if not law.averaging:
        count = min(n for n in (batch, examples) if n is not None)
    elif examples is not None and batch is not None and law.steps is not None:
        count = min(examples, batch * law.steps)
    else:
        count = examples if examples is not None else (batch or 1)
    return max(1, min(count, limit))


def forward_model(declaration: ClientDeclaration, *, images: int, unroll: int) -> ForwardModel:
    """Choose how to simulate a client of this protocol.

    Up to ``unroll`` declared steps of an optimizer in `RULES` are unrolled; longer training, an
    undeclared learning rate or another optimizer is matched as if the mean direction were one
    gradient.
    """
    law = StepLaw.of(declaration)
    steps, lr = law.steps, law.lr
    if not law.averaging or steps is None or lr is None:
        return BatchGradient()
    # A defense took what weight decay had added to the gradient of the one step.
    if law.one_gradient and not (declaration.weight_decay and declaration.defenses):
        return BatchGradient()
    if declaration.optimizer not in RULES or steps > unroll:
        return BatchGradient()
    return LocalTraining.of(declaration, images=images, steps=steps, without=law.decayed)
