"""`bract describe` writes once, keeps what people wrote, and says what to type next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bract.cli.describe import describe_app
from bract.errors import BractError
from bract.models import create_model
from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.protocol.update import parameters_of


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """Captures of one client of a small network, which declare nothing but its examples."""
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=4, channels=1, image_size=16, activation="relu")
    loss = F.cross_entropy(model(torch.rand(2, 1, 16, 16)), torch.tensor([0, 3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    ObservationStore(tmp_path / "captures").save(
        Observation(
            round=1,
            client="node-1",
            parameters=parameters_of(model),
            update={n: 0.1 * g for n, g in zip(names, gradients, strict=True)},
            declaration=ClientDeclaration(num_examples=2, activation="relu"),
        )
    )
    return tmp_path


OPTIONS: dict[str, Any] = {
    "model": "lenet-strided",
    "input.shape": "1,16,16",
    "input.mean": "0",
    "input.std": "1",
    "training.lr": 0.1,
    "training.batch_size": 2,
    "training.local_epochs": 1,
    "training.optimizer": "sgd",
    "classes": None,
}


def test_what_is_said_is_written_and_what_is_shown_is_completed(
    app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    describe_app(app, OPTIONS, ask=False, as_json=True)
    text = (app / "bract.yaml").read_text()
    assert "classes: 4" in text and "lr: 0.1\n" in text and "guessed" not in text
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["description"]["input"]["shape"] == [1, 16, 16] and found["doubts"] == []
    assert f"next: bract audit {app}" in " ".join(said.err.split())


def test_a_file_that_is_there_is_checked_and_changed_by_force_alone(app: Path) -> None:
    describe_app(app, OPTIONS, ask=False)
    path = app / "bract.yaml"
    path.write_text("# mine\n" + path.read_text())
    before = path.read_text()
    describe_app(app, {}, ask=False)
    assert path.read_text() == before
    with pytest.raises(BractError, match=r"training\.lr would change; pass --force"):
        describe_app(app, {"training.lr": 0.2}, ask=False)
    assert path.read_text() == before
    describe_app(app, {"training.lr": 0.2}, ask=False, force=True)
    assert "lr: 0.2" in path.read_text() and "classes: 4" in path.read_text()


def test_a_single_client_is_described_by_its_own_option(app: Path) -> None:
    options = OPTIONS | {"clients": ["node-1:local_steps=3,batch_size=1"]}
    describe_app(app, options, ask=False)
    assert "local_steps: 3" in (app / "bract.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input.shape": "1x16x16"}, "--input '1x16x16': expected numbers such as 3,32,32"),
        ({"input.mean": "half"}, "--mean 'half': expected numbers"),
        ({"clients": ["node-1"]}, "expected NAME:key=value"),
        ({"clients": ["node-1:steps=2"]}, "Did you mean 'clients.node-1.local_steps'?"),
        ({"defenses": ["adadefense:alpha"]}, "expected key=value"),
        ({"training.lr": -1.0}, "training.lr: found -1.0"),
        ({"model": None}, "model is not given"),
    ],
)
def test_a_wrong_option_gives_one_error_and_writes_nothing(
    app: Path, options: Any, said: str
) -> None:
    with pytest.raises(BractError) as refused:
        describe_app(app, OPTIONS | options, ask=False)
    assert said in str(refused.value) and not (app / "bract.yaml").exists()
