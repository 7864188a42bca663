"""Two 2-D normal distributions, one a client: accuracy and decision boundaries of strategies."""

from __future__ import annotations

import base64
import io
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from bract.seeds import derive_seed
from bract.updates.update import Tensors
from experiments.harness.points import SETTINGS, Points, network, score
from experiments.harness.simulation import STRATEGIES, simulate
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

_SIDE = 64
_REACH = 6.0

Positive = Annotated[int, Field(ge=1)]


class GaussiansSettings(Settings):
    """One strategy on one setting of the two distributions.

    Attributes
    ----------
    setting
        A name of `experiments.harness.points.SETTINGS`.
    strategy
        ``centralised`` or a name of `experiments.harness.simulation.STRATEGIES`.
    samples
        Points of a client; a tenth of them is held out.
    """

    setting: str = "two-class"
    strategy: str = "fedavg-uniform"
    samples: Positive = 40_000
    rounds: Positive = 4
    seeds: Positive = 5


class GaussiansRunner(Runner[GaussiansSettings]):
    """Trains one seed a unit; its sample is the accuracy on all held-out points.

    ``roughness`` is the length of the decision boundary in a window of 12 by 12: the number of
    neighbouring cells of a 64 by 64 grid that are of different classes, over 64. A straight line
    across has 1 to 2.
    """

    settings: ClassVar[type[Settings]] = GaussiansSettings
    code: ClassVar[tuple[str, ...]] = (
        *("bract.strategies", "experiments.harness.points", "experiments.harness.simulation"),
        "experiments.papers.runners.gaussians",
    )

    def count(self, settings: GaussiansSettings) -> int:
        """Return the number of seeds."""
        return settings.seeds

    def run(self, settings: GaussiansSettings, unit: int, context: Context) -> Measured:
        """Train under one seed."""
        del context
        count = len(SETTINGS[settings.setting])
        clients = [Points(settings.setting, i, settings.samples, unit) for i in range(count)]
        points = torch.cat([client.held_out[0] for client in clients])
        classes = torch.cat([client.held_out[1] for client in clients])
        start = network(derive_seed(unit, "model")).state_dict()
        weights: list[float] = []
        arrays: Tensors = start
        if settings.strategy == "centralised":
            pooled = Points.pooled(clients, unit)
            for number in range(settings.rounds):
                arrays, _, _ = pooled.train(arrays, number + 1, 0.0)
        else:
            strategy = STRATEGIES[settings.strategy](count)
            rows = simulate(
                strategy, clients, start, settings.rounds, lambda a: score(a, points, classes)[1]
            )
            arrays, weights = rows[-1]["arrays"], rows[-1]["weights"]
        loss, accuracy = score(arrays, points, classes)
        shares = _grid(arrays)
        values: dict[str, float | None] = {
            "accuracy": accuracy,
            "loss": loss,
            "roughness": _roughness(shares > 0.5),
        }
        if weights:
            values["weight0"] = weights[0]
        shown = _picture(shares, clients) if unit == 0 else None
        return Measured([Sample(group=unit, values=values)], pictures=shown)


@torch.no_grad()
def _grid(arrays: Tensors) -> Tensor:
    """Return the share of class 1 over the window, ``(64, 64)``, the second axis upwards."""
    model = network(0)
    model.load_state_dict(arrays)
    side = torch.linspace(-_REACH, _REACH, _SIDE)
    points = torch.stack(torch.meshgrid(side, side.flip(0), indexing="xy"), -1).reshape(-1, 2)
    return torch.softmax(model(points), 1)[:, 1].reshape(_SIDE, _SIDE)


def _roughness(classes: Tensor) -> float:
    across = (classes[:, 1:] != classes[:, :-1]).sum() + (classes[1:] != classes[:-1]).sum()
    return float(across) / _SIDE


def _picture(shares: Tensor, clients: list[Points]) -> str:
    """Return a PNG in base64: shares of class 1 from blue to red, some held-out points darker."""
    from PIL import Image

    colours = torch.stack([0.35 + 0.6 * shares, 0.75 - 0.35 * (2 * shares - 1).abs(),
                           0.95 - 0.6 * shares], -1)  # fmt: skip
    for client in clients:
        points, classes = client.held_out
        for point, label in zip(points[:60], classes[:60], strict=True):
            column, row = ((point + _REACH) / (2 * _REACH) * (_SIDE - 1)).round().int().tolist()
            if 0 <= column < _SIDE and 0 <= row < _SIDE:
                dark = torch.tensor([0.55, 0.05, 0.05] if label else [0.05, 0.1, 0.5])
                colours[_SIDE - 1 - row, column] = dark
    pixels = (colours.clamp(0.0, 1.0) * 255).round().byte().numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", optimize=True)
    return base64.b64encode(stream.getvalue()).decode("ascii")
