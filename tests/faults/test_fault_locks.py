"""One writer a run directory, for as long as it lives and no longer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from refusals import check_named, refused

from bract.cli.audit import auditing
from bract.cli.compare import Steps, compare_defenses
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.cli.report import report_run
from bract.cli.run import run_federation
from bract.config import FederationConfig, build_config
from bract.disk import LockedError, holder, lock
from bract.errors import RunFailedError
from bract.report.read import read_run
from bract.rundir import RunDirectory

HOLD = """
import sys, time
from pathlib import Path
from bract.disk import lock
with lock(Path(sys.argv[1]), what="it", doing="bract run f.yaml"):
    print("held", flush=True)
    time.sleep(60)
"""

QUICK = build_config({"name": "mine", "rounds": 1, "data": {"image_size": 16}})


@contextlib.contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def started(folder: Path, status: str = "running") -> RunDirectory:
    run = RunDirectory(folder / "mine")
    run.create(QUICK)
    run.update_state(status=status, flower_run_id="7")
    return run


def never(*_: object) -> Path:
    raise AssertionError("a step of a comparison that somebody else runs")


COMMANDS: dict[str, Callable[[Path], object]] = {
    "run": lambda runs: run_federation(QUICK, runs, Launch(), resume=True),
    "run over it": lambda runs: run_federation(QUICK, runs, Launch(), overwrite=True),
    "audit": lambda runs: auditing(runs / "mine").__enter__(),
    "report": lambda runs: report_run(runs / "mine", redact=False, as_json=False),
}


@pytest.mark.faults
@pytest.mark.parametrize("command", COMMANDS)
def test_whoever_works_on_a_run_keeps_every_other_command_out(command: str, tmp_path: Path) -> None:
    run = started(tmp_path)
    before = sorted(path.name for path in run.root.iterdir())
    with held(run.lock_path) as other, pytest.raises(LockedError) as caught:
        COMMANDS[command](tmp_path)
    said = str(caught.value)
    check_named(said, other.pid, "f.yaml")
    assert "then try again" in said and "\n" not in said
    assert sorted({path.name for path in run.root.iterdir()} - {".lock"}) == before
    assert run.state().flower_run_id == "7"


@pytest.mark.faults
def test_two_comparisons_of_one_name_do_not_meet(tmp_path: Path) -> None:
    root = tmp_path / "mine-compare"
    root.mkdir()
    with held(root / ".lock") as other, pytest.raises(LockedError, match=str(other.pid)):
        compare_defenses(QUICK, tmp_path, Steps(never, never, never), defenses=["noise"])


@pytest.mark.faults
def test_a_lock_ends_with_its_holder_and_its_file_locks_nothing(tmp_path: Path) -> None:
    run = started(tmp_path)
    with held(run.lock_path) as other:
        assert str(other.pid) in str(holder(run.lock_path))
        other.kill()
        other.wait()
        assert run.lock_path.exists()
        assert holder(run.lock_path) is None
        with run.claim():
            # What this process holds keeps this process from nothing.
            assert holder(run.lock_path) is None


@pytest.mark.faults
def test_a_file_that_says_no_more_than_nonsense_is_another_process(tmp_path: Path) -> None:
    place = tmp_path / "lock"
    with held(place):
        place.write_text("[" * 5000)
        with (
            pytest.raises(LockedError, match="another process is working"),
            lock(place, what="x", doing="y", patience=0.0),
        ):
            pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "lock").symlink_to(tmp_path / "other")
    with (
        refused("file-unwritable"),
        lock(tmp_path / "lock", what="x", doing="y"),
    ):
        pass
    assert (tmp_path / "other").read_text() == "untouched"


@pytest.mark.faults
@pytest.mark.parametrize("status", ["starting", "running"])
def test_a_run_that_nobody_works_on_is_shown_as_interrupted(status: str, tmp_path: Path) -> None:
    run = started(tmp_path, status)
    with held(run.lock_path):
        assert shown(run) == status
    assert shown(run) == "interrupted"
    with held(run.server_lock_path):
        assert shown(run) == status
    with run.claim():
        assert shown(run) == "interrupted"


def shown(run: RunDirectory) -> str:
    state = read_run(run.root).run
    assert state is not None
    return state.status


class Follower(LocalFederation):
    """A launcher whose processes are not there; the test says how the server app fares."""

    def __init__(self, config: FederationConfig, run: RunDirectory) -> None:
        super().__init__(config, run, Launch())
        self.answers: list[str | None] = []

    def _submit(self) -> str:
        return "7"

    def _flower_status(self) -> str:
        return "running"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after the server app without a pause."""
    monkeypatch.setattr("bract.cli.launch.launcher.SERVER_INTERVAL", 0.0)


@pytest.mark.usefixtures("at_once")
def test_only_finished_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second launcher wrote another state into run.json: the first one took it for the end."""
    run = started(tmp_path)
    states = iter(["running", "starting", "interrupted", "running"])
    asked = []

    def server(self: RunDirectory) -> str | None:
        asked.append(next(states, None))
        if asked[-1] is not None:
            self.update_state(status=asked[-1])
            return "process 1"
        self.update_state(status="finished")
        return None

    monkeypatch.setattr(RunDirectory, "server", server)
    follower = Follower(QUICK, run)
    try:
        follower.train(lambda row: None)
    finally:
        follower.processes.end()
    assert asked == ["running", "starting", "interrupted", "running", None]


@pytest.mark.usefixtures("at_once")
def test_a_server_app_that_is_gone_without_a_word_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path)
    alive = iter(["process 1", "process 1", None])
    monkeypatch.setattr(RunDirectory, "server", lambda self: next(alive))
    follower = Follower(QUICK, run)
    try:
        with refused("run-failed", 0):
            follower.train(lambda row: None)
    finally:
        follower.processes.end()


@pytest.mark.usefixtures("at_once")
def test_a_server_app_that_went_before_it_was_looked_for_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path)
    monkeypatch.setattr(RunDirectory, "server", lambda self: None)
    monkeypatch.setattr(Follower, "_flower_status", lambda self: pytest.fail("Flower was asked"))
    follower = Follower(QUICK, run)
    try:
        with refused("run-failed", 0):
            follower.train(lambda row: None)
    finally:
        follower.processes.end()


def test_a_start_that_came_to_no_round_does_not_block_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoSuperLink:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> None:
            raise RunFailedError("the SuperLink did not take the run")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("bract.cli.run.LocalFederation", NoSuperLink)
    for _ in range(2):
        with refused("run-failed"):
            run_federation(QUICK, tmp_path, Launch())
        state = RunDirectory(tmp_path / "mine").state()
        assert (state.status, state.error) == ("failed", "the SuperLink did not take the run")
    (tmp_path / "mine" / "models" / "last.safetensors").write_bytes(b"")
    with refused("file-taken", tmp_path):
        run_federation(QUICK, tmp_path, Launch())
