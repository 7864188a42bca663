"""Every experiment that can be run runs, end to end, at the smallest scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bract.cli.main import app
from bract.papers.catalog import experiments

pytestmark = pytest.mark.slow


def test_all_smoke_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["paper", "run", "--scale", "smoke", "--out", str(tmp_path), "--format", "json"],
    )
    assert done.exit_code == 0, done.output
    ran = {row["experiment"] for row in json.loads(done.stdout)}
    assert ran == {name for name, one in experiments().items() if "smoke" in one.scales}
