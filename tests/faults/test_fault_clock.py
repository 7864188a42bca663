"""A clock that is set: nothing waits for it, and no round takes less than no time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from encrypted_runs import small, small_grid, train
from flwr.app import Message

DAY = 86_400.0


def test_rounds_take_the_time_that_passed_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    set_by = 0.0

    def jump(message: Message) -> None:
        nonlocal set_by
        number = message.content.config_records["config"]["server-round"]
        set_by = {1: DAY, 2: -DAY}[int(str(number))]

    monkeypatch.setattr(time, "time", lambda: clock() + set_by)
    config = small(rounds=2)
    begun = time.monotonic()
    run = train(tmp_path, config, small_grid(tmp_path, config, faults=jump))
    took = time.monotonic() - begun
    rows = run.metrics()
    assert [row.round for row in rows] == [0, 1, 2]
    assert all(row.seconds is not None and 0 <= row.seconds <= took for row in rows)
