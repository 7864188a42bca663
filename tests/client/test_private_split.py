"""Under `training.private` no example decides whether another one is trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from refusals import refused

from bract.client import app as client_app
from bract.config import build_config, dump_config
from bract.data import views
from bract.defenses import configured
from bract.installed import release
from bract.protocol import arrays
from bract.server import loopback

TABLE = {
    "columns": [{"name": "x", "kind": "continuous", "low": 0.0, "high": 1.0}],
    "target": {"name": "y", "categories": ["a", "b"]},
}
ROWS = [f"{i / 250},{'ab'[(i * 7919) % 13 % 2]}" for i in range(250)]
BOUND, SECRET = 0.1, bytes(range(32))


def config(validation: float, path: Path | None = None, **changes: Any) -> Any:
    section = {
        "name": "asked",
        "clients": 1,
        "rounds": 1,
        "data": {
            "name": "csv",
            "path": None if path is None else str(path),
            "input": "table",
            "table": TABLE,
            "validation": validation,
        },
        "model": {"name": "linear"},
        "training": {
            "algorithm": "fedsgd",
            "batch_size": 1000,
            "lr": 0.1,
            "private": {"noise_multiplier": 1e-9, "max_grad_norm": BOUND},
        },
    }
    return build_config(section | changes)


def written(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(["x,y", *rows]) + "\n")
    return path


def summed(tmp_path: Path, rows: list[str], validation: float, run: int) -> Any:
    """Return the sum of clipped gradients that a site sends, in units of the bound."""
    pytest.importorskip("opacus")
    run_config = config(validation)
    node: dict[str, Any] = {
        "partition-id": 0,
        "name": "site",
        "state-dir": str(tmp_path / "state"),
        "data-path": str(written(tmp_path / "own.csv", rows)),
    }
    grid = loopback.LoopbackGrid(
        client_app.app, [node], {"federation": dump_config(run_config)}, run_id=run
    )
    spec: Any = views.known_spec(run_config.data)
    model = configured.configured_model(run_config, spec)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    about = ConfigRecord({"server-round": 1, "bract-version": release()})
    content = RecordDict({"config": about, "arrays": arrays.to_arrays(zeros)})
    reply: Any
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "")])
    update = arrays.from_arrays(reply.content["update"])
    count = reply.content["metrics"]["num-examples"]
    return torch.cat([v.flatten().double() for v in update.values()]) * count / BOUND


@pytest.mark.parametrize("validation", [0.0, 0.5])
def test_a_record_more_moves_the_sum_by_the_bound_at_most(
    tmp_path: Path, validation: float
) -> None:
    run = iter(range(1, 100))
    without = summed(tmp_path, ROWS, validation, next(run))
    for place in (0, 100, 101, 250):
        rows = [*ROWS[:place], "0.123,b", *ROWS[place:]]
        moved = summed(tmp_path, rows, validation, next(run)) - without
        assert float(moved.norm()) <= 1.0 + 1e-3


def examples(path: Path, rows: list[str], secret: bytes = SECRET) -> list[set[float]]:
    found = config(0.3, written(path, rows))
    data, (test, _) = views.client_data(found, 0, secret), views.own_test_data(found, secret)
    assert views.training_examples(found, 0, secret) == len(data.images)
    return [set(part.flatten().tolist()) for part in (data.images, data.validation_images, test)]


def test_each_record_keeps_its_side_by_its_content(tmp_path: Path) -> None:
    before = examples(tmp_path / "own.csv", ROWS)
    after = examples(tmp_path / "own.csv", ["0.123,b", *reversed(ROWS)])
    for one, other in zip(before, after, strict=True):
        assert len(one) > 30
        assert one <= other
    assert sum(map(len, after)) == sum(map(len, before)) + 1 == 251
    assert examples(tmp_path / "own.csv", ROWS, bytes(32)) != before
    # Equal records share a side.
    assert examples(tmp_path / "own.csv", ROWS * 2) == before


def test_a_validation_share_that_takes_everything_is_an_error(tmp_path: Path) -> None:
    alone = config(0.999, written(tmp_path / "own.csv", ["0.5,a"] * 20))
    with refused("data-empty", 20, "data.validation"):
        views.client_data(alone, 0, SECRET)


def test_parts_of_the_runs_own_data_hold_validation_out_by_content() -> None:
    digits = config(0.2, data={"name": "digits", "validation": 0.2}, clients=3)
    data = views.client_data(digits, 1, SECRET)
    whole = len(views.client_data(digits, 1).images) + len(
        views.client_data(digits, 1).validation_images
    )
    assert len(data.images) + len(data.validation_images) == whole
    assert 0.1 < len(data.validation_images) / whole < 0.3
