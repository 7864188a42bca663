"""Real processes: a client that is late is refused by name, and takes part again afterwards."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from refusals import check_named

from bract.cli.launch.launcher import LocalFederation
from bract.config import build_config
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow

pytestmark = pytest.mark.processes

LATE = 2


def signalled(run: RunDirectory, client: int, number: signal.Signals) -> int:
    """Send a signal to every process that writes to a client's log: all of its own."""
    log, count = (run.logs / f"client-{client}.log").absolute(), 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                process.send_signal(number)
                count += 1
        except (OSError, psutil.Error):
            continue
    return count


def wait(what: Callable[[], bool], within: float = 300) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_late_update_is_refused_by_name_and_its_client_takes_part_again(tmp_path: Path) -> None:
    config = build_config(
        {
            "name": "late",
            "clients": 3,
            "rounds": 15,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 1},
            "capture": {"enabled": False},
            "strategy": {"tolerate_failures": True, "quorum": 2, "grace": 1, "timeout": 120},
        }
    )
    run = RunDirectory(tmp_path / "late")
    run.create(config)

    def rows() -> dict[int, MetricsRow]:
        return {row.round: row for row in run.metrics()}

    with LocalFederation(config, run) as federation:
        training = threading.Thread(target=federation.train, args=(lambda row: None,))
        training.start()
        wait(lambda: 1 in rows())
        assert signalled(run, LATE, signal.SIGSTOP)
        wait(lambda: any(row.failures for row in rows().values()))
        assert signalled(run, LATE, signal.SIGCONT)
        training.join(300)
        assert not training.is_alive()
    found = rows()
    assert max(found) == 15
    (missed,) = [row for row in found.values() if row.failures]
    assert [f.client for f in missed.failures] == ["client-2"]
    check_named(missed.failures[0].reason, 2, 3, "strategy.quorum", 1)
    assert set(missed.clients) == {"client-0", "client-1"}
    (reported,) = [row for row in found.values() if row.late]
    assert [(late.client, late.round) for late in reported.late] == [("client-2", missed.round)]
    assert reported.round > missed.round
    words = f"client-2: its update of round {missed.round} came after that had closed; refused"
    assert words in (run.logs / "server.log").read_text()
    between = [found[n] for n in range(missed.round + 1, reported.round)]
    assert all(set(row.clients) == {"client-0", "client-1"} for row in between)
    assert set(found[max(found)].clients) == {"client-0", "client-1", "client-2"}
