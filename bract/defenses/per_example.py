"""Per-example privacy: noise on sums of clipped per-example gradients (Abadi et al. 2016)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor

from bract.defenses.accountants import spent_by
from bract.defenses.base import DEFENSES, Defense, DefenseError, ProtectContext, Stage
from bract.updates.update import Tensors

_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@DEFENSES.register("per-example")
class PerExample(Defense):
    """Clip every example's gradient, and add noise to their sum, in every step of training.

    It happens while a client trains: `training.private` of a configuration, or Opacus in an app of
    one's own, which declares it by this name. It protects no finished update.

    Parameters
    ----------
    noise_multiplier
        Deviation of the noise on a step's sum, over ``max_grad_norm``.
    epsilon, delta
        Privacy of one example over the whole run, where the noise follows from it.
    max_grad_norm
        Largest 2-norm of an example's gradient.
    accountant
        What adds the steps up: ``rdp`` or ``prv``.
    """

    name: ClassVar[str] = "per-example"
    title: ClassVar[str] = "per-example privacy"
    summary: ClassVar[str] = "training whose every step adds noise to clipped gradients"
    stage: ClassVar[Stage] = Stage.MODEL

    max_grad_norm: _Positive = 1.0
    noise_multiplier: _Positive | None = None
    epsilon: _Positive | None = None
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    accountant: Literal["rdp", "prv"] = "rdp"

    @model_validator(mode="after")
    def _some_noise(self) -> PerExample:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("give noise_multiplier, or epsilon")
        return self

    def spent(self, steps: int, rate: float) -> float | None:
        """Return epsilon after so many steps; None where the noise is not known.

        Parameters
        ----------
        rate
            With what probability a step draws an example.
        """
        if self.noise_multiplier is None:
            return self.epsilon
        if importlib.util.find_spec("opacus") is None:
            raise DefenseError(
                "defense 'per-example': its epsilon is Opacus' to compute; pip install "
                "'bract[opacus]'",
                code="package-missing",
            )
        return spent_by([(self.noise_multiplier, rate, steps)], self.delta, self.accountant).epsilon

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Refuse: a finished update has no per-example gradients.

        Raises
        ------
        DefenseError
            Always.
        """
        del update, state, context
        raise DefenseError(
            "defense 'per-example' works on gradients of single examples while a client trains; "
            "set training.private, or train with Opacus in an app of your own"
        )
