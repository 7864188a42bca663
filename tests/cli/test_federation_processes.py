import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bract.cli.launch.processes import Processes
from bract.errors import RunFailedError


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    started = Processes(tmp_path, threads=1, fork_server=False)
    started.begin()
    yield started
    started.end()


def end_at_once(processes: Any, name: Any) -> None:
    processes.start(name, [sys.executable, "-c", "print('its last words'); raise SystemExit(3)"])


def stay(processes: Any, name: Any) -> None:
    processes.start(name, [sys.executable, "-c", "import time; time.sleep(60)"])


def noticed(processes: Any, expendable: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        processes.check_alive(expendable)
        time.sleep(0.05)


def test_a_process_that_ends_by_itself_is_named_with_its_last_words(processes: Any) -> None:
    end_at_once(processes, "client-0")
    said = "client-0 ended by itself with code 3: its last words; see .*client-0.log"
    with pytest.raises(RunFailedError, match=said):
        noticed(processes, ())


def test_one_of_several_that_may_be_lost_is_said_once_and_the_last_one_is_not_let_go(
    processes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("client-0", "client-1")
    stay(processes, "superlink")
    end_at_once(processes, "client-1")
    with caplog.at_level(logging.WARNING):
        while "client-1" not in caplog.text:
            processes.check_alive(names)
        processes.check_alive(names)
    assert caplog.text.count("goes on without it") == 1
    end_at_once(processes, "client-0")
    with pytest.raises(RunFailedError, match="client-0 ended by itself"):
        noticed(processes, names)


def test_every_process_ends_with_the_others(tmp_path: Path) -> None:
    processes = Processes(tmp_path, threads=1, fork_server=False)
    processes.begin()
    stay(processes, "superlink")
    (running,) = processes._running
    processes.end()
    assert running.handle.poll() is not None
    assert not processes.folder.exists()
