"""Every experiment that can be run runs, end to end, at the smallest scale."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.papers.__main__ import paper as app
from experiments.papers.catalog import experiments

pytestmark = pytest.mark.slow


def test_all_smoke_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["run", "--scale", "smoke", "--out", str(tmp_path), "--format", "json"],
    )
    assert done.exit_code == 0, done.output
    ran = {row["experiment"] for row in json.loads(done.stdout)}
    assert ran == {name for name, one in experiments().items() if "smoke" in one.scales}


def test_an_experiment_that_is_killed_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    name, path = "guardian/figure-6", tmp_path / "guardian" / "figure-6-smoke.json"
    line = ["run", name, "--scale", "smoke", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.papers", *line],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    try:
        while not path.exists():
            assert process.poll() is None, "ended before it wrote anything"
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    begun = len(json.loads(path.read_text())["rows"])
    assert begun >= 1
    done = CliRunner().invoke(app, [*line, "--format", "json"])
    assert done.exit_code == 0, done.output
    assert f"{2 - begun} of 2 units to run" in done.stderr
    assert len(json.loads(path.read_text())["rows"]) == 2
