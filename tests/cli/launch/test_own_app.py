"""A third-party app in the simulation engine: its files and number of nodes are submitted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from bract.cli.launch import own_app
from bract.cli.launch.own_app import OwnAppFederation
from bract.rundir import RunDirectory


def test_the_app_is_submitted_with_its_number_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []

    def start(files: Any, engine: Any) -> int:
        submitted.extend((sorted(files), dict(engine)))
        return 7

    @contextlib.contextmanager
    def control(_: OwnAppFederation) -> Iterator[Any]:
        yield SimpleNamespace(start=start)

    monkeypatch.setattr(own_app, "check_ray", lambda _: None)
    monkeypatch.setattr(OwnAppFederation, "_control", control)
    (tmp_path / "app" / "captures").mkdir(parents=True)
    for name in ("pyproject.toml", "task.py", "captures/one"):
        (tmp_path / "app" / name).write_text("")
    federation = OwnAppFederation(tmp_path / "app", RunDirectory(tmp_path / "run"), 5, "off")
    federation._write_app()
    assert federation._submit() == "7"
    federation.processes.end()
    files, engine = submitted
    assert files == ["pyproject.toml", "task.py"]
    assert (engine["num_supernodes"], engine["client_resources_num_cpus"]) == (5, 1)


def test_a_run_that_does_not_end_is_given_up_with_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_app, "check_ray", lambda _: None)
    monkeypatch.setattr(own_app, "_INTERVAL", 0.01)
    monkeypatch.setattr(OwnAppFederation, "_submit", lambda _: "7")
    monkeypatch.setattr(OwnAppFederation, "_flower_status", lambda _: "running")
    federation = OwnAppFederation(tmp_path / "app", RunDirectory(tmp_path / "run"), 2, "off")
    try:
        with refused("run-failed", "running", "superlink.log"):
            federation.finish(0.05)
    finally:
        federation.processes.end()
