"""What no audit handles is said in round 1, and nothing of what one does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from foreign_apps import clients_of
from torch import nn

from bract.models import create_model
from bract.server import listen


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 2, 2)
        self.out = nn.Conv2d(2, 1, 1)


MODELS: dict[str, tuple[nn.Module, str | None]] = {
    "segmentation": (UNet(), "segmentation"),
    "signals": (nn.Sequential(nn.Conv1d(1, 4, 5), nn.Flatten(), nn.Linear(32, 5)), None),
    "sequences": (nn.ModuleDict({"lstm": nn.LSTM(1, 10), "out": nn.Linear(10, 1)}), None),
    "images": (create_model("lenet", classes=10, channels=1, image_size=16), None),
    "rows": (nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1)), None),
    "words": (nn.Sequential(nn.Embedding(400, 8), nn.Conv1d(8, 4, 3), nn.Linear(4, 2)), None),
}


def warnings_of(model: nn.Module, folder: Path, log: Any, **options: Any) -> list[str]:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        content = {"arrays": message.content.array_records["arrays"]}
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({**content, "metrics": metrics}), reply_to=message)

    grid = listen(clients_of(app, 2), store=folder, **options)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    content = RecordDict({"arrays": ArrayRecord(state)})
    with log.at_level(logging.WARNING):
        for _ in range(2):
            sent = [grid.create_message(content, "train", node, "1") for node in (1, 2)]
            list(grid.send_and_receive(sent))
    return [r.getMessage() for r in log.records if "may not be audited" in r.getMessage()]


@pytest.mark.parametrize("name", MODELS)
def test_what_no_audit_handles_is_said_once_in_round_one(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, cause = MODELS[name]
    found = warnings_of(model, tmp_path, caplog)
    assert len(found) == (cause is not None)
    assert all(str(cause) in line for line in found)


def test_a_declared_autoencoder_may_end_with_a_convolution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    declared = {"loss": "reconstruction"}
    assert warnings_of(UNet(), tmp_path, caplog, declaration=declared) == []
