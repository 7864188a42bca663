"""How an update follows from the gradients of a client's local steps: one law for every reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bract.schema.declaration import ClientDeclaration
from bract.updates.momentum import mean_velocity, root_of_squares

LINEAR = ("sgd", "nesterov")
"""Optimizers that move by a sum of gradients, whatever their sizes."""


@dataclass(frozen=True)
class StepLaw:
    """Relation between a client's update and the gradients of its local steps, as declared.

    FedSGD sends one batch's gradient; FedAvg sends how far ``steps`` local steps moved the model.
    Nothing else asks a declaration for its algorithm or its number of local steps.

    Attributes
    ----------
    averaging
        Whether the update is how far local steps moved the model (FedAvg), and no gradient.
    steps
        Number of local steps; 1 of a gradient, None where it is not declared.
    lr
        Learning rate; None where it is not declared.
    optimizer, momentum
        As declared.
    clipped
        Whether the gradient of every step is clipped.
    decays
        Weight decay that the update shows as a share of the sent parameters: that of steps of SGD
        which no defense changed, 0 of all others.
    """

    averaging: bool
    steps: int | None
    lr: float | None
    optimizer: str
    momentum: float
    clipped: bool
    decays: float

    @classmethod
    def of(cls, declaration: ClientDeclaration) -> Self:
        """Return the law of a declared client."""
        p = declaration
        averaging = p.algorithm != "fedsgd"
        shown = averaging and p.optimizer == "sgd" and not p.defenses
        return cls(
            averaging=averaging,
            steps=p.local_steps if averaging else 1,
            lr=p.lr,
            optimizer=p.optimizer,
            momentum=p.momentum,
            clipped=averaging and (p.max_grad_norm or p.max_grad_value) is not None,
            decays=p.weight_decay if shown else 0.0,
        )

    @property
    def counted(self) -> int:
        """Return the number of steps, 1 where it is not declared."""
        return self.steps or 1

    @property
    def one_step(self) -> bool:
        """Return whether the client took one step, so that no gradient depends on another."""
        return self.steps == 1

    @property
    def one_gradient(self) -> bool:
        """Return whether the update is one batch's gradient, or one step of plain SGD along it."""
        plain = self.one_step and self.optimizer == "sgd" and not self.clipped
        return not self.averaging or plain

    @property
    def linear(self) -> bool:
        """Return whether the update is a sum of gradients."""
        return not self.averaging or self.optimizer in LINEAR

    @property
    def scaled(self) -> bool:
        """Return whether the factor from a gradient to the update is known."""
        return not self.averaging or bool(self.lr and self.steps)

    @property
    def rate(self) -> float:
        """Return that factor without momentum, ``lr * steps``; 1 of a gradient, and if unknown."""
        if not self.averaging or not self.lr or not self.steps:
            return 1.0
        return self.lr * self.steps

    @property
    def to_gradient(self) -> float:
        """Return the factor from the update to a gradient, ``1 / rate``."""
        return 1.0 / self.rate

    @property
    def gain(self) -> float:
        """Return how many times `rate` linear steps lead along a constant gradient."""
        if not self.averaging:
            return 1.0
        velocity = mean_velocity(self.momentum, self.counted)
        return 1.0 + self.momentum * velocity if self.optimizer == "nesterov" else velocity

    @property
    def noise_gain(self) -> float:
        """Return the deviation of `Observation.gradient` over that of noise drawn in every step.

        Of steps of SGD, with momentum or not: what a step draws is in the velocities of all later
        ones.
        """
        if not self.averaging or not self.scaled:
            return 1.0
        return root_of_squares(self.momentum, self.counted) / self.counted

    @property
    def decayed(self) -> float:
        """Return how often an undefended update, scaled to a gradient, holds the sent parameters.

        One step of SGD with a weight decay of lambda holds them lambda times; the mean of ``K``
        steps with a momentum of ``m`` as often as the mean of ``lambda (1 + m + ... + m^s)``, and
        what the way that the parameters go adds besides. A defense is no such sum, so nothing is
        taken from what it made; other optimizers weigh the decay otherwise.
        """
        if not self.decays:
            return 0.0
        return self.decays * mean_velocity(self.momentum, self.counted)
