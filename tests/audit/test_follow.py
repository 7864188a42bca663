"""The audit beside the training: what it takes next, what it leaves out, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bract import Observation, ObservationStore
from bract.audit import follow
from bract.audit.follow import Follower
from bract.config import build_config
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.live import LiveAudit

IMAGE = (1, 8, 8)


def capture(run: RunDirectory, number: int, client: str = "client-0") -> None:
    weight = {"0.weight": torch.ones(3, 64), "0.bias": torch.zeros(3)}
    ObservationStore(run.captures).save(
        Observation(
            round=number,
            client=client,
            parameters=weight,
            update=weight,
            declaration=ClientDeclaration(model="nobody-knows-it", image_shape=IMAGE, classes=3),
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"name": "run"}))
    return run


def test_the_first_captured_round_and_every_so_many_after_it_are_due(run: RunDirectory) -> None:
    follower = Follower(run, ["ig"], every=3)
    follower.look()
    assert not follower.queue
    for number in range(2, 9):
        capture(run, number)
    follower.look()
    follower.look()
    assert list(follower.queue) == [(2, "client-0"), (5, "client-0"), (8, "client-0")]


def test_a_full_queue_drops_what_has_waited_longest_and_counts_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "QUEUE", 2)
    follower = Follower(run, ["ig"], every=1)
    for number in (1, 2, 3, 4, 5):
        capture(run, number)
    follower.look()
    assert [number for number, _ in follower.queue] == [4, 5]
    found = LiveAudit.parse_text(run.live_path.read_bytes(), source="live.json")
    assert run.live_path.stat().st_mode & 0o077 == 0
    assert (found.queue, found.skipped) == (2, 3)


def test_an_attack_that_raises_keeps_no_other_upload_from_its_turn(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(run, ["ig"], every=1)
    for number in (1, 2):
        capture(run, number)

    def attack(self: Any, number: int, client: str) -> Any:
        if number == 1:
            raise ZeroDivisionError("an attack's own mistake")
        return iter(())

    monkeypatch.setattr(Follower, "_attack", attack)
    follower.look()
    assert follower.step() and follower.step() and not follower.step()
    assert (follower.state.done, follower.state.failed) == (1, 1)
    assert "own mistake" in (follower.state.error or "")


def test_no_captured_round_is_removed_while_an_upload_is_attacked(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObservationStore(run.captures)
    capture(run, 1)

    def attack(self: Any, number: int, client: str) -> Any:
        assert store.retire(keep=0, before=2) == []
        return iter(())

    monkeypatch.setattr(Follower, "_attack", attack)
    follower = Follower(run, ["ig"], every=1)
    follower.look()
    assert follower.step()
    assert (follower.state.done, follower.state.error) == (1, None)
    assert len(store.retire(keep=0, before=2)) == 1


def test_what_is_attacked_is_an_ordinary_result_of_the_run(run: RunDirectory) -> None:
    follower = Follower(run, ["ig"], every=1)
    capture(run, 1)
    follower.look()
    assert follower.step()
    assert follower.state.done == 1 and follower.state.error is None
    (result,) = run.audit.glob("ig/*.json")
    assert "nobody-knows-it" in result.read_text()


def wait_for(found: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.processes
def test_the_process_ends_as_soon_as_whoever_started_it_has(run: RunDirectory) -> None:
    capture(run, 1)
    command = [sys.executable, "-m", "bract.audit.follow", str(run.root), "--attack", "ig"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:

        def waits() -> bool:
            state = run.live()
            return state is not None and (state.done, state.status) == (1, "waiting")

        wait_for(waits)
        state = run.live()
        assert state is not None and state.pid == process.pid
        second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert second.returncode == 1 and "live audit: " in second.stderr
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    state = run.live()
    assert state is not None and state.status == "ended"


def test_a_killed_live_audit_is_not_taken_for_a_running_one(run: RunDirectory) -> None:
    follower = Follower(run, ["ig"], every=1)
    follower.note(status="attacking", current="round 1, client-0")
    state = run.live()
    assert state is not None and (state.status, state.current) == ("ended", None)
