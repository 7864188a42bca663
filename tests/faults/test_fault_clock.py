"""A clock that is set: nothing waits for it, and no round takes less than no time."""

from __future__ import annotations

import datetime
import importlib
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from breaking import Broken, measured
from encrypted_runs import small, small_grid, train
from flwr.app import Message

from bract.installed import flower
from bract.runtime import clock

DAY = 86_400


def test_rounds_take_the_time_that_passed_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = time.time
    ahead = 0

    def jump(message: Message) -> None:
        nonlocal ahead
        number = message.content.config_records["config"]["server-round"]
        ahead = {1: DAY, 2: -DAY}[int(str(number))]

    monkeypatch.setattr(time, "time", lambda: machine() + ahead)
    config = small(rounds=2)
    begun = time.monotonic()
    run = train(tmp_path, config, small_grid(tmp_path, config, faults=jump))
    took = time.monotonic() - begun
    rows = run.metrics()
    assert [row.round for row in rows] == [0, 1, 2]
    assert all(row.seconds is not None and 0 <= row.seconds <= took for row in rows)


def test_flower_counts_the_seconds_that_pass_where_a_federation_says_from_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    date = importlib.import_module(flower.DATE)
    user = importlib.import_module("flwr.supercore.corestate.in_memory_corestate")
    for module in (date, user):
        monkeypatch.setattr(module, "now", date.now)
    machine = date.now
    monkeypatch.delenv(clock.EPOCH, raising=False)
    clock.use_monotonic_clock()
    assert date.now is machine
    # As if the machine's clock had been set back by a day since the federation began.
    monkeypatch.setenv(clock.EPOCH, repr(float(clock.epoch()) + DAY))
    clock.use_monotonic_clock()
    ahead = user.now() - machine()
    assert date.now is user.now
    assert abs(ahead - datetime.timedelta(days=1)) < datetime.timedelta(minutes=1)


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler and Linux"
)
def test_a_federation_goes_on_whatever_the_clock_is_set_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    ahead = tmp_path / "ahead"
    ahead.write_bytes(struct.pack("q", 0))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("TEST_CLOCK", str(ahead))
    broken = Broken(tmp_path)
    broken.wait()
    for days in (1, -1, 0):
        with ahead.open("r+b") as file:
            file.write(struct.pack("q", days * DAY))
        number = max(broken.rounds())
        begun = time.monotonic()
        # One of them may have ended before the clock was set.
        broken.wait(number + 2)
        seconds = time.monotonic() - begun
        measured(f"clock {days:+d} days", 0, seconds, "two rounds")
    stamps = [row.time for row in broken.run.metrics() if row.time is not None]
    assert max(stamps) - min(stamps) > DAY, "the clock was not set"
    assert all(row.seconds is not None and row.seconds >= 0 for row in broken.run.metrics())
    broken.command.process.send_signal(signal.SIGTERM)
    code, _, _ = broken.end()
    assert code == 128 + signal.SIGTERM
    assert broken.command.nothing_is_left()
