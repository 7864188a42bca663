"""The real ClientApp under the real strategies, without processes."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import bract.client.app as client_app
import bract.client.session
from bract.config import build_config, dump_config
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.evaluation import evaluate
from bract.protocol.records import from_arrays
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

ROUNDS = 3


def federation(tmp_path: Path, *, private_seeds: bool = False, **changes: Any) -> Any:
    config = build_config(
        {
            "clients": 3,
            "rounds": ROUNDS,
            "seed": 3,
            "data": {"image_size": 16, "validation": 0.2},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "capture": {"enabled": False},
            "strategy": {"name": "fedboosting"},
            **changes,
        }
    )
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    nodes: list[Any] = [{"partition-id": i} for i in range(config.clients)]
    if private_seeds:
        for i, node in enumerate(nodes):
            seed_file = tmp_path / f"private-seed-{i}"
            seed_file.touch(mode=0o600)
            seed_file.write_text(f"{3**60 + 200 + i}\n")
            node["private-seed-file"] = str(seed_file)
    grid = LoopbackGrid(
        client_app.app,
        nodes,
        {"federation": dump_config(config)},
    )
    Federation(config, run).train(grid)
    return config, run, grid


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def test_the_clients_score_the_fused_models_on_their_own_validation_split(tmp_path: Path) -> None:
    config, run, grid = federation(tmp_path, rounds=1)
    row = run.metrics()[-1].boosting
    sent = next(m for m in grid.log if m.metadata.message_type == "evaluate.fused")
    spec = data_spec(config.data)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=16, activation="relu")
    for i in range(3):
        model.load_state_dict(from_arrays(sent.content.array_records[f"fused-{i}"]))
        for j in range(3):
            data = client_data(config, j)
            _, accuracy = evaluate(model, data.validation_images, data.validation_labels, spec=spec)
            assert row.V[i][j] == float(f"{accuracy:.3g}")


def test_a_poisoned_client_gets_less_than_the_uniform_weight_from_the_second_round_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(config: Any, client: Any, secret: Any) -> Any:
        data = client_data(config, client)
        if client != 1:
            return data
        order = torch.roll(torch.arange(10), 1)
        return type(data)(
            data.images,
            order[data.labels],
            data.validation_images,
            order[data.validation_labels],
        )

    monkeypatch.setattr(bract.client.session, "client_data", poisoned)
    _, run, _ = federation(tmp_path)
    rows = [row for row in run.metrics() if row.round >= 2]
    assert len(rows) == ROUNDS - 1
    for row in rows:
        assert row.clients["client-1"].weight < 1 / 3
        assert row.clients["client-1"].weight == row.boosting.weights[1]
        assert min(row.boosting.weights) == row.boosting.weights[1]


def test_every_strategy_of_the_configuration_trains_the_real_client(tmp_path: Path) -> None:
    for name in ("fedavg", "fedprox", "fedboosting"):
        _, run, _ = federation(tmp_path / name, rounds=1, strategy={"name": name})
        row = run.metrics()[-1]
        assert row.round == 1
        assert sum(c.weight for c in row.clients.values()) == pytest.approx(1.0)
        assert (row.boosting is not None) == (name == "fedboosting")
        judged = row.clients["client-0"].trained_accuracy
        assert (judged is not None) == (name == "fedboosting")


def test_a_client_with_an_empty_validation_split_costs_its_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A tenth of six examples rounds down to none.
    _, run, _ = federation(
        tmp_path,
        rounds=1,
        data={"image_size": 16, "partition": {"kind": "sizes", "sizes": [200, 6, 200]}},
    )
    row = run.metrics()[-1]
    assert [values[1] for values in row.boosting.V] == [None, None, None]
    assert row.failures[0].client == "client-1"
    assert "score a model on 0 images" in caplog.text


@pytest.mark.parametrize(
    ("defense", "model", "server_lr"),
    [("adadefense", "lenet", 0.001), ("guardian", "lenet", 1.0), ("fedkl", "lenet-bn", 1.0)],
)
def test_defended_updates_are_fused_and_weighed_like_bare_ones(
    tmp_path: Path, defense: Any, model: Any, server_lr: Any
) -> None:
    _, run, _ = federation(
        tmp_path,
        # Some keys learn faster than others: these are drawn alike every time.
        private_seeds=True,
        rounds=4 if defense == "fedkl" else 1,
        model={"name": model, "activation": "relu"},
        strategy={"name": "fedboosting", "server_lr": server_lr},
        defenses=[{"name": defense}],
    )
    found = run.metrics()[-1].boosting
    assert all(0.0 <= value <= 1.0 for row in found.V for value in row)
    assert sum(found.weights) == pytest.approx(1.0)
    if defense == "fedkl":
        # Each validator judges with its own lock; under a wrong one the model guesses.
        scores = [value for row in found.V for value in row]
        assert sum(scores) / len(scores) > 0.5
