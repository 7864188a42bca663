"""With `max_epsilon` no buffer leaves but a count of steps, whatever its dtype."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from bract.client import app as client_app
from bract.config import build_config, dump_config
from bract.installed import release
from bract.protocol import arrays
from bract.server import loopback
from bract.updates import update as updates


class Counting(nn.Module):
    """Counts, in whole numbers, which pixels of the data are bright."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.register_buffer("bright", torch.zeros(64, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        """Return logits."""
        x = x.flatten(1)
        if self.training:
            self.bright += (x > 0).sum(0)
        return self.last(x)


class Stepping(nn.Module):
    """Counts its steps, as batch normalisation does."""

    num_batches_tracked: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        """Return logits."""
        self.num_batches_tracked += int(self.training)
        return self.last(x.flatten(1))


class Tied(nn.Module):
    """Has one weight under two names, and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        """Return logits."""
        return self.last(self.second(self.first(x.flatten(1))))


@pytest.mark.parametrize(("model", "leaves"), [(Counting, False), (Stepping, True), (Tied, True)])
def test_of_all_buffers_a_limited_epsilon_lets_only_a_count_of_steps_leave(
    model: Any, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:{model.__name__}"
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    config = build_config(
        {
            "name": "asked",
            "clients": 2,
            "rounds": 2,
            "data": {"image_size": 8},
            "model": {"name": name},
            "training": {"lr": 0.1, "local_steps": 1, "batch_size": 1},
            "defenses": [{"name": "noise", "std": 400.0, "clip": 1.0}],
        }
    ).as_own_word()
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"max_epsilon: 1.0\nmodels: ['{name}']\n")
    node: dict[str, Any] = {
        "partition-id": 0,
        "state-dir": str(tmp_path / "state"),
        "policy": str(policy),
    }
    grid = loopback.LoopbackGrid(client_app.app, [node], {"federation": dump_config(config)})
    about = ConfigRecord({"server-round": 1, "bract-version": release()})
    content = RecordDict({"config": about, "arrays": arrays.to_arrays(model().state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "")])
    assert reply.has_content() is leaves
    if not leaves:
        assert "max_epsilon" in str(reply.error.reason)
        assert "bright" in str(reply.error.reason)


def test_a_count_of_steps_is_one_whole_number_under_its_name() -> None:
    assert updates.counts_steps("layer.num_batches_tracked", torch.int64, ())
    assert updates.counts_steps("num_batches_tracked", "int64", ())
    for name, dtype, shape in (
        ("layer.num_batches_tracked", torch.int64, (64,)),
        ("layer.num_batches_tracked", torch.float32, ()),
        ("layer.bright", torch.int64, ()),
    ):
        assert not updates.counts_steps(name, dtype, shape)
