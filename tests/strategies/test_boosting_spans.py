"""The stages of a FedBoosting round are in its profile."""

import json
from pathlib import Path

import pytest
from encrypted_runs import small, small_grid, train

from bract.process import timeline

STAGES = {"load data", "score fused models", "fuse models", "sum updates", "read and check answers"}


def test_a_profile_has_the_stages_of_training_validation_and_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    monkeypatch.setenv(timeline.FOLDER, str(folder))
    config = small(
        strategy={"name": "fedboosting"},
        data={"image_size": 8, "validation": 0.2},
    )
    train(tmp_path, config, small_grid(tmp_path, config))
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    names = [json.loads(line)["name"] for line in lines]
    assert set(names) >= STAGES
    assert names.count("score fused models") == 3
