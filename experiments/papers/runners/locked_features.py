"""What the first normalisation puts out, with and without a key-lock, over a whole data set."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bract.config import build_config
from bract.data.views import test_data
from experiments.harness.federation import Clients, correct
from experiments.harness.result import own
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

Positive = Annotated[int, Field(ge=1)]


class FeaturesSettings(Settings):
    """A federation, and the outputs of its first normalisation layer over the test data."""

    data: str = "digits"
    model: str = "lenet-strided-bn"
    defenses: tuple[dict[str, Any], ...] = ()
    clients: Positive = 3
    rounds: Positive = 20
    training: dict[str, Any] = {}
    seeds: Positive = 4


class FeaturesRunner(Runner[FeaturesSettings]):
    """A unit is one seed.

    Per channel, the outputs are compared with the standard normal distribution that the layer has
    before scale and shift: ``shift`` is the mean over channels of the absolute mean, ``spread``
    the standard deviation over channels of their standard deviations, ``distance`` the mean
    Wasserstein-1 distance of a channel's sorted outputs to those before scale and shift.
    """

    settings: ClassVar[type[Settings]] = FeaturesSettings
    code: ClassVar[tuple[str, ...]] = (
        *("bract.client", "bract.strategies"),
        *own("harness.federation", "papers.runners.locked_features"),
    )

    def count(self, settings: FeaturesSettings) -> int:
        """Return the number of seeds."""
        return settings.seeds

    def run(self, settings: FeaturesSettings, unit: int, context: Context) -> Measured:
        """Train under one seed and look at every client's layer."""
        del context
        data: dict[str, Any] = {"name": settings.data}
        config = build_config(
            {
                "seed": unit,
                "clients": settings.clients,
                "rounds": settings.rounds,
                "model": {"name": settings.model, "activation": "relu"},
                "data": data,
                "training": settings.training,
                "defenses": [dict(entry) for entry in settings.defenses],
            },
            source="experiment",
        )
        clients = Clients(config)
        for _ in range(settings.rounds):
            clients.round()
        images, labels = test_data(config.data)
        inputs = clients.spec.normalise(images)
        samples = []
        for model in clients.models():
            put_out, before = _outputs(model, inputs)
            values: dict[str, float | None] = {
                "shift": float(put_out.mean(1).abs().mean()),
                "spread": float(put_out.std(1).std()),
                "distance": float((put_out.sort(1).values - before.sort(1).values).abs().mean()),
                "accuracy": float(correct(model, inputs, labels).mean()),
            }
            samples.append(Sample(group=unit, values=values))
        return Measured(samples)


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the first normalisation puts out and what it would without scale and shift.

    Both are ``(channels, values)``.
    """
    layer = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: Any, found: Tensor) -> None:
        del module
        kept.extend((found, given[0]))

    handle = layer.register_forward_hook(keep)
    try:
        model.eval()(inputs)
    finally:
        handle.remove()
    put_out, given = (value.transpose(0, 1).flatten(1) for value in kept)
    assert layer.running_mean is not None and layer.running_var is not None
    deviation = (layer.running_var + layer.eps).sqrt()
    return put_out, (given - layer.running_mean[:, None]) / deviation[:, None]
