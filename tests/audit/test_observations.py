"""What an audit reads beside the captures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from refusals import refused

from bract import Observation, ObservationStore
from bract.audit.observations import Observations
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.data.sources import open_source
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration


def test_an_audit_downloads_nothing_that_a_configuration_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    class Absent:
        def __init__(self, *, download: bool, **_: Any) -> None:
            asked.append(download)
            raise RuntimeError("Dataset not found.")

    monkeypatch.setattr(torchvision.datasets, "MNIST", Absent)
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"clients": 1, "data": {"name": "mnist", "download": True}}))
    ObservationStore(run.captures).save(
        Observation(
            round=1,
            client="client-0",
            parameters={"w": torch.zeros(2)},
            update={"w": torch.ones(2)},
            declaration=ClientDeclaration(model="lenet"),
        )
    )
    data = Observations(run, AuditRequest(attacks=["ig"])).data
    assert data is not None
    with refused("file-missing", "download"):
        open_source(data, "test")
    assert asked == [False]
