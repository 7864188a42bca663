import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.cli.launch import launcher
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow


def test_a_superlink_that_has_another_folder_is_named_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({"name": "apart"})
    run = RunDirectory(tmp_path / "apart")
    run.create(config)
    ticks = itertools.count(step=20)
    monkeypatch.setattr("bract.cli.launch.launcher.time.monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(LocalFederation, "_submit", lambda self: "7")
    monkeypatch.setattr(LocalFederation, "_flower_status", lambda self: "finished:completed")
    federation = LocalFederation(config, run, Launch(superlink="superlink:8000"))
    try:
        with refused("run-failed", "SuperLink", "superlink:8000", run.root):
            federation.train(lambda row: None)
    finally:
        federation.processes.end()


def commands(tmp_path: Any, monkeypatch: Any, launch: Any, seed: Any = 3) -> Any:
    """The SuperNodes' command lines, as the process list shows them, and what their files hold."""
    run = RunDirectory(tmp_path / f"run-{seed}")
    config = build_config({"name": "seeds", "clients": 2, "seed": seed})
    run.create(config)
    started, held = [], []
    federation = LocalFederation(config, run, launch)

    def start(name: Any, command: Any, private: Any) -> Any:
        started.append(" ".join(command))
        settings = " ".join(private.values())
        assert ("private" in settings) == (launch.private_seed is not None)
        found = re.search(r'private-seed-file="([^"]+)"', settings)
        if found:
            file = Path(found[1])
            assert file.stat().st_mode & 0o777 == 0o600
            held.append(file.read_text().strip())

    monkeypatch.setattr(federation.processes, "start", start)
    try:
        for client in range(2):
            federation._start_supernode(client, "127.0.0.1:1", [])
    finally:
        federation.processes.end()
    return started, held


def test_clients_get_no_seed_that_the_server_knows(tmp_path: Any, monkeypatch: Any) -> None:
    started, _ = commands(tmp_path, monkeypatch, Launch())
    assert len(started) == 2 and not [line for line in started if "private" in line]


def test_private_seeds_come_from_a_seed_of_their_own_and_stay_off_the_process_list(
    tmp_path: Any, monkeypatch: Any
) -> None:
    lines, first = commands(tmp_path, monkeypatch, Launch(private_seed=2**70), seed=3)
    _, again = commands(tmp_path, monkeypatch, Launch(private_seed=2**70), seed=4)
    _, other = commands(tmp_path, monkeypatch, Launch(private_seed=2**71), seed=5)
    assert first == again and len({*first, *other}) == 4
    assert all(int(seed) > 2**200 for seed in first)
    assert not [seed for seed in first for line in lines if seed in line]


def test_a_superlink_that_does_not_answer_fails_the_run_and_is_named(tmp_path: Path) -> None:
    federation = LocalFederation(
        build_config({}), RunDirectory(tmp_path), Launch(superlink="127.0.0.1:1")
    )
    federation._write_app()
    federation.run_id = "7"
    for ask in (federation._submit, federation._flower_status):
        with refused("run-failed", "SuperLink", "127.0.0.1:1") as failed:
            ask()
        assert str(failed.value).startswith("127.0.0.1:1: cannot be reached")
    federation.processes.end()


@pytest.mark.processes
def test_a_file_in_place_of_a_socket_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "8000.sock").touch()
    launch = Launch(superlink=str(tmp_path / "8000.sock"))
    with (
        refused("usage", "bract superlink"),
        LocalFederation(build_config({}), RunDirectory(tmp_path / "run"), launch),
    ):
        pass


@pytest.mark.parametrize("noted", [False, True])
def test_a_run_that_was_stopped_is_no_failed_one(
    noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = build_config({"name": "halted"})
    run = RunDirectory(tmp_path / "halted")
    run.create(config)
    run.append_metrics(MetricsRow(round=3))

    def submit(_: LocalFederation) -> str:
        run.update_state(status="running", flower_run_id="7", waiting="waiting for clients: 1 of 3")
        if noted:
            run.update_state(status="stopped")
        return "7"

    monkeypatch.setattr(launcher, "SERVER_INTERVAL", 0.0)
    monkeypatch.setattr(LocalFederation, "_submit", submit)
    monkeypatch.setattr(LocalFederation, "_flower_status", lambda self: "finished:stopped")
    federation = LocalFederation(config, run, Launch(superlink="superlink:8000"))
    federation._server_seen = True
    try:
        with refused("run-stopped", 7, "stopped", 3, "--resume"):
            federation.train(lambda row: None)
    finally:
        federation.processes.end()
    assert capsys.readouterr().err.count("waiting for clients: 1 of 3") == 1
