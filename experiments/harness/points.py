"""Clients that hold points of 2-D normal distributions, and the small network that parts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.seeds import derive_seed
from bract.updates.update import Tensors

# Centre of class 0, centre of class 1, spread: one entry a client; None draws them.
SETTINGS: dict[str, list[Any]] = {
    "two-class": [((-2.0, 1.0), (0.5, 2.5), 0.8), ((0.5, -2.5), (3.0, 1.0), 1.4)],
    "drawn": [None, None],
    "one-class": [((-1.0, -1.0), None, 0.8), (None, (1.5, 1.0), 1.6)],
}


class Points:
    """A client with points ``(N, 2)`` and classes ``(N,)``; the held-out tenth validates."""

    def __init__(self, setting: str, index: int, samples: int, seed: int) -> None:
        rng = np.random.default_rng(derive_seed(seed, setting, index))
        chosen = SETTINGS[setting][index]
        if chosen is None:
            chosen = (*rng.uniform(-3.0, 3.0, (2, 2)).tolist(), rng.uniform(0.5, 1.5))
        first, second, spread = chosen
        classes = rng.integers(0, 2, samples)
        if first is None or second is None:
            classes[:] = 0 if second is None else 1
        centres = np.array([first or second, second or first])
        points = centres[classes] + spread * rng.standard_normal((samples, 2))
        x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(classes)
        cut = samples // 10
        self.held_out, self.own, self.seed = (x[:cut], y[:cut]), (x[cut:], y[cut:]), seed

    @classmethod
    def pooled(cls, clients: list[Points], seed: int) -> Points:
        """Return one client that holds everybody's training points."""
        made = cls.__new__(cls)
        made.own = (
            torch.cat([c.own[0] for c in clients]),
            torch.cat([c.own[1] for c in clients]),
        )
        made.held_out, made.seed = clients[0].held_out, seed
        return made

    def train(
        self, arrays: Tensors, server_round: int, proximal_mu: float
    ) -> tuple[Tensors, int, dict[str, float]]:
        """One epoch of Adam, 0.003, batches of 8."""
        del proximal_mu
        model = network(0)
        model.load_state_dict(arrays)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
        x, y = self.own
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", server_round))
        for batch in torch.randperm(len(x), generator=generator).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        local = model.state_dict()
        loss, accuracy = score(local, x, y)
        return local, len(x), {"trained_loss": loss, "trained_accuracy": accuracy}

    def score(self, arrays: Tensors) -> tuple[float, float]:
        """Loss and accuracy on the held-out tenth."""
        return score(arrays, *self.held_out)


def network(seed: int) -> nn.Sequential:
    """2-8-2 with a sigmoid between; the softmax is in the loss."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.Sigmoid(), nn.Linear(8, 2))


@torch.no_grad()
def score(arrays: Tensors, points: Tensor, classes: Tensor) -> tuple[float, float]:
    """Return mean loss and accuracy."""
    model = network(0)
    model.load_state_dict(arrays)
    logits = model(points)
    right = (logits.argmax(1) == classes).float().mean()
    return float(F.cross_entropy(logits, classes)), float(right)
