"""Define what one client does in a round, as ``bract.yaml`` describes it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import Field
from pydantic import model_validator as check_all

from bract.config.schedule import ConstantRate, CosineRate
from bract.config.work import (
    Betas,
    ClassWeights,
    Count,
    Factors,
    LocalWork,
    Momenta,
    NotNegative,
    Probability,
    Rate,
)
from bract.schema.declaration import ClientDeclaration


class DescribedWork(LocalWork):
    """What one client does in a round; a client's own section lists what differs.

    Steps follow from ``local_epochs``, ``batch_size`` and each capture's number of examples, or
    are ``local_steps``. ``drop_last`` leaves out a last batch that is smaller than the others.
    ``proximal_mu`` is FedProx's. ``lr_factors`` are what multiplies ``lr`` at each step of a round,
    as a schedule within the round does, and ``momenta`` the momentum of each, of Adam the first of
    its betas. ``max_grad_norm`` is the norm to which every step's gradient is clipped,
    ``max_grad_value`` the absolute value to which each of its values is. ``betas``, ``eps`` and
    ``amsgrad`` are Adam's and AdamW's. ``label_smoothing`` and ``class_weights``, one a class, are
    those of cross entropy; with ``soft_targets`` its targets are probabilities, as of mixup.
    """

    drop_last: bool | None = None
    num_examples: Count | None = None
    proximal_mu: NotNegative | None = None
    lr_factors: Annotated[Factors, Field(min_length=1)] | None = None
    momenta: Annotated[Momenta, Field(min_length=1)] | None = None
    max_grad_norm: Rate | None = None
    max_grad_value: Rate | None = None
    betas: Betas | None = None
    eps: Rate | None = None
    amsgrad: bool | None = None
    label_smoothing: Probability | None = None
    class_weights: ClassWeights | None = None
    soft_targets: bool | None = None

    @check_all(mode="after")
    def _one_way_of_clipping(self) -> Self:
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(
                "max_grad_norm and max_grad_value are both given; one way of clipping is simulated"
            )
        return self

    @check_all(mode="after")
    def _weights_of_labels(self) -> Self:
        if self.soft_targets and self.class_weights is not None:
            raise ValueError(
                "class_weights are given with soft_targets; weights of labels are simulated"
            )
        return self

    @check_all(mode="after")
    def _some_step_moves(self) -> Self:
        if self.lr_factors is not None and not any(self.lr_factors):
            raise ValueError("lr_factors are all 0; give what multiplies lr at each step")
        return self

    @check_all(mode="after")
    def _schedule_says_all(self) -> Self:
        schedule = self.lr_schedule
        if schedule is None or isinstance(schedule, ConstantRate):
            return self
        if self.lr is None:
            raise ValueError("lr_schedule is given without lr; give the learning rate of round 1")
        if isinstance(schedule, CosineRate) and schedule.rounds is None:
            raise ValueError(
                "lr_schedule is a cosine of unknown length; give its rounds, as many as the app ran"
            )
        return self

    @check_all(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs are both given; give one of them")
        return self

    def over(self, declaration: ClientDeclaration, server_round: int) -> dict[str, Any]:
        """Return what this work sets of a capture's declaration, by field; None leaves it."""
        examples = self.num_examples or declaration.num_examples
        batch = self.batch_size or declaration.batch_size
        steps = self.local_steps
        if steps is None and self.local_epochs is not None and examples and batch:
            steps = planned_steps(examples, batch, self.local_epochs, bool(self.drop_last))
        found = self.declared(server_round)
        if self.lr_factors is not None:
            # Attacks divide an update by its steps and their mean rate.
            mean = math.fsum(self.lr_factors) / len(self.lr_factors)
            rate = found["lr"] or declaration.lr
            found["lr"] = None if rate is None else rate * mean
            found["lr_factors"] = tuple(factor / mean for factor in self.lr_factors)
        optimizer = found["optimizer"] or declaration.optimizer
        if self.momenta and optimizer not in ("adam", "adamw"):
            # Laws of many steps have one momentum.
            found["momentum"] = math.fsum(self.momenta) / len(self.momenta)
        return found | {
            "batch_size": min(batch, examples) if batch and examples else batch,
            "local_steps": steps,
            **{name: getattr(self, name) for name in _AS_DESCRIBED},
        }


_AS_DESCRIBED = (
    *("num_examples", "proximal_mu", "max_grad_norm", "max_grad_value"),
    *("momenta", "betas", "eps", "amsgrad"),
    *("label_smoothing", "class_weights", "soft_targets"),
)
"""Fields of `DescribedWork` that a declaration holds as they are."""


def planned_steps(examples: int, batch_size: int, epochs: int, drop_last: bool = False) -> int:
    """Return the steps of ``epochs`` passes over ``examples``; at least one a pass."""
    batches = examples // batch_size if drop_last else math.ceil(examples / batch_size)
    return epochs * max(1, batches)
