"""Processor time that a client spends on its step and on its defense, over that of the step."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from bract.client.defenses import ProtectContext, build_defenses
from bract.defenses.guardian import Guardian
from bract.updates.update import Tensors, flatten
from experiments.harness.uploads import network_for, plain_spec
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

Positive = Annotated[int, Field(ge=1)]


class TimeSettings(Settings):
    """What is timed.

    Attributes
    ----------
    what
        ``step``: gradients of ``steps`` batches with their defense. ``metric``: Guardian's
        performance metric of a given gradient, ``steps`` times. ``loss``: what it stands for, the
        loss at ``steps`` moved parameters with its gradient.
    repeats
        Measurements; the ratio to the undefended step is taken in each.
    """

    what: Literal["step", "metric", "loss"] = "step"
    model: str = "lenet-strided"
    defenses: tuple[dict[str, Any], ...] = ()
    batch: Positive = 32
    steps: Positive = 10
    size: Positive = 32
    channels: Literal[1, 3] = 3
    repeats: Positive = 5


class TimeRunner(Runner[TimeSettings]):
    """A unit is one measurement: ``seconds`` and, of a step, ``ratio`` to the undefended step."""

    settings: ClassVar[type[Settings]] = TimeSettings
    code: ClassVar[tuple[str, ...]] = (
        *("bract.client.defenses", "experiments.papers.runners.defense_time"),
    )

    def count(self, settings: TimeSettings) -> int:
        """Return the number of measurements."""
        return settings.repeats

    def run(self, settings: TimeSettings, unit: int, context: Context) -> Measured:
        """Time once, the undefended step first."""
        del context
        model, images, labels = _given(settings)
        _gradient(model, images, labels)
        if settings.what != "step":
            seconds = _metric(settings, model, images, labels)
            return Measured([Sample(group=unit, values={"seconds": seconds})])
        plain = _steps(settings, model, images, labels, defended=False)
        seconds = _steps(settings, model, images, labels, defended=True)
        values: dict[str, float | None] = {"seconds": seconds, "ratio": seconds / plain}
        return Measured([Sample(group=unit, values=values)])


def _given(settings: TimeSettings) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    shape = (settings.batch, settings.channels, settings.size, settings.size)
    model = network_for(plain_spec(shape[1:]), settings.model, 0)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=generator)
    return model, images, torch.randint(10, (settings.batch,), generator=generator)


def _gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Tensors:
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(model(images), labels)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def _steps(
    settings: TimeSettings,
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    defended: bool,
) -> float:
    chain = build_defenses([dict(entry) for entry in settings.defenses] if defended else [])
    state: Tensors = {}
    begun = time.process_time()
    for number in range(settings.steps):
        update = _gradient(model, images, labels)
        context = ProtectContext(
            round=number + 1, seed=1, model=model, images=images, labels=labels
        )
        chain.protect(update, state, context)
    return time.process_time() - begun


def _metric(
    settings: TimeSettings, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> float:
    update = _gradient(model, images, labels)
    if settings.what == "metric":
        guardian, g = Guardian(iterations=settings.steps), flatten(update)
        begun = time.process_time()
        guardian.solve(g, guardian.epsilon)
        return time.process_time() - begun
    begun = time.process_time()
    for _ in range(settings.steps):
        found = _gradient(model, images, labels)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(found[name], alpha=-1e-4)
    return time.process_time() - begun
