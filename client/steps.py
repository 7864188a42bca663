"""The steps of a client's local training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from bract.config.config import TrainingConfig


class Steps:
    """torch's SGD or Adam, in their functional form.

    An optimizer of `torch.optim` imports torch's compiler when it is made, which the process of
    every message, or the one that it is forked from, would hold in memory. The steps are the same
    to the bit.

    Parameters
    ----------
    parameters
        What is trained; one without a gradient is left as it is.
    config
        Gives optimizer, rate, momentum and weight decay.
    """

    def __init__(self, parameters: Sequence[Tensor], config: TrainingConfig) -> None:
        self._parameters = list(parameters)
        self._config = config
        self._velocity: list[Tensor | None] = [None] * len(self._parameters)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters]
        if config.optimizer != "adam":
            self._moments = []
        self._counts = [torch.tensor(0.0) for _ in self._moments]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients."""
        chosen = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        parameters = [self._parameters[i] for i in chosen]
        gradients = [p.grad for p in parameters if p.grad is not None]
        config = self._config
        if config.optimizer == "adam":
            adam(
                parameters,
                gradients,
                [self._moments[i][0] for i in chosen],
                [self._moments[i][1] for i in chosen],
                [],
                [self._counts[i] for i in chosen],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=config.lr,
                weight_decay=config.weight_decay,
                eps=1e-8,
                maximize=False,
            )
            return
        velocity = [self._velocity[i] for i in chosen]
        sgd(
            parameters,
            gradients,
            velocity,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            lr=config.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for i, kept in zip(chosen, velocity, strict=True):
            self._velocity[i] = kept
