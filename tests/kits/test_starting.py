"""A kit's server apps keep their runs in the kit, or where the unit or the container says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import federation

from bract.kits import starting
from bract.kits.provisioning import provision
from bract.server.capture_folders import CAPTURES


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("provisioned")
    provision(federation("a", "b"), folder / "kits", source=folder / "federation.yaml")
    return folder / "kits" / "operator"


@pytest.mark.parametrize("which", ["superlink", "superexec"])
def test_runs_lie_in_the_kit_unless_the_environment_says_otherwise(
    operator: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    seen: list[str] = []

    def started(*_: Any, **__: Any) -> None:
        seen.append(os.environ[CAPTURES])

    monkeypatch.setattr(starting, f"start_{which}", started)
    start = getattr(starting, f"start_{which}_of")
    for named in (None, "/srv/runs"):
        monkeypatch.setenv(CAPTURES, named or "")
        if named is None:
            monkeypatch.delenv(CAPTURES)
        start(operator, None)
    assert seen == [str(operator / "runs"), "/srv/runs"]


def test_containers_and_units_name_a_folder_that_they_may_write(operator: Path) -> None:
    services = yaml.safe_load((operator / "compose.yaml").read_text())["services"]
    service = services["superexec"]
    assert service["environment"]["HOME"] == "/tmp"
    assert f"./runs:{service['environment'][CAPTURES]}" in service["volumes"]
    unit = (operator / "superexec.service").read_text()
    assert f"Environment={CAPTURES}=/var/lib/bract/runs\n" in unit
    assert "StateDirectory=bract\n" in unit
