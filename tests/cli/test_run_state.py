"""What `bract run` writes about a run is what the report shows of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract.cli import run as command
from bract.cli.launch.launcher import Launch
from bract.cli.signals import Stopped
from bract.config import build_config
from bract.errors import RunStoppedError
from bract.installed import package_versions
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow


class NoProcesses:
    """Stands for the local federation: one row, as the server would leave it."""

    def __init__(self, _config: object, run: RunDirectory, _launch: Launch) -> None:
        self.run = run

    def __enter__(self) -> NoProcesses:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def train(self, on_round: Any) -> None:
        row = MetricsRow(round=1, seconds=0.5)
        self.run.append_metrics(row)
        on_round(row)
        self.run.update_state(status="finished")


def test_the_report_shows_every_version_that_the_run_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LocalFederation", NoProcesses)
    config = build_config({"name": "seam", "rounds": 1, "data": {"image_size": 16}})
    run = command.run_federation(config, tmp_path, Launch())
    facts = gather(run.root)
    assert facts["run"]["versions"] == package_versions()
    assert {"bract", "flwr", "torch", "python"} <= set(facts["run"]["versions"])
    assert facts["run"]["status"] == "finished" and facts["run"]["name"] == "seam"


class Ended(NoProcesses):
    """Is stopped in a round, or after its server app has failed, which also says so when ended."""

    failed_before = False

    def train(self, on_round: Any) -> None:
        del on_round
        self.run.update_state(status="failed" if self.failed_before else "running", error="before")
        raise Stopped(signal.SIGINT)

    def __exit__(self, *_error: object) -> None:
        if not self.failed_before:
            self.run.update_state(status="failed", error="the engine is gone")


@pytest.mark.parametrize(
    ("failed_before", "status", "error"),
    [(False, "interrupted", None), (True, "failed", "before")],
)
def test_a_server_app_that_fails_while_it_is_ended_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed_before: bool, status: str, error: Any
) -> None:
    monkeypatch.setattr(command, "LocalFederation", Ended)
    monkeypatch.setattr(Ended, "failed_before", failed_before)
    config = build_config({"name": "seam", "rounds": 1, "data": {"image_size": 16}})
    with pytest.raises(Stopped):
        command.run_federation(config, tmp_path, Launch())
    state = RunDirectory(tmp_path / "seam").state()
    assert (state.status, state.error) == (status, error)


class Halted(NoProcesses):
    """Is stopped at its SuperLink."""

    def train(self, on_round: Any) -> None:
        del on_round
        self.run.update_state(status="running")
        raise RunStoppedError(7, 1)


def test_a_run_that_was_stopped_is_noted_as_stopped_and_shown_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LocalFederation", Halted)
    config = build_config({"name": "seam", "rounds": 1, "data": {"image_size": 16}})
    with pytest.raises(RunStoppedError):
        command.run_federation(config, tmp_path, Launch())
    state = RunDirectory(tmp_path / "seam").state()
    assert (state.status, state.error) == ("stopped", None) and state.finished is not None
    assert gather(tmp_path / "seam")["run"]["status"] == "stopped"
