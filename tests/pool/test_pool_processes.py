"""Processes of a pool: a dead one costs its job alone, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bract.pool import Lost, Note, Processes

pytestmark = pytest.mark.processes


def do_as_asked(job: tuple[str, str], note: Note) -> str:
    """Do what a job says, in a process whose number a file beside it holds."""
    what, path = job
    Path(path).write_text(str(os.getpid()))
    note(what)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(7)
    if what == "sleep":
        time.sleep(600)
    return what


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def test_a_process_that_dies_costs_its_job_alone(tmp_path: Path) -> None:
    jobs = [(what, str(tmp_path / f"{i}")) for i, what in enumerate(["die", "leave", "do", "do"])]
    noted: list[object] = []
    with Processes(do_as_asked, 2) as pool:
        found = dict(pool.run(jobs, lambda job, what: noted.append((job[0], what))))
    assert found == {
        jobs[0]: Lost("its worker process was ended by signal 9 (Killed)"),
        jobs[1]: Lost("its worker process ended with exit code 7"),
        jobs[2]: "do",
        jobs[3]: "do",
    }
    assert ("do", "do") in noted


def test_an_idle_process_that_died_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "first"
    with Processes(do_as_asked, 1) as pool:
        assert [outcome for _, outcome in pool.run([("do", str(path))])] == ["do"]
        pid = int(path.read_text())
        os.kill(pid, signal.SIGKILL)
        while alive(pid):  # a busy machine takes its time
            time.sleep(0.05)
        assert [outcome for _, outcome in pool.run([("do", str(path))])] == ["do"]


def test_a_job_that_a_dying_process_never_began_goes_to_another(tmp_path: Path) -> None:
    path = tmp_path / "first"
    with Processes(do_as_asked, 1) as pool:
        list(pool.run([("do", str(path))]))
        pid = int(path.read_text())
        os.kill(pid, signal.SIGSTOP)  # its pipe still takes the job
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        assert [outcome for _, outcome in pool.run([("do", str(path))])] == ["do"]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
        return state != "Z"
    return False


SLEEPERS = """
import sys
from bract.pool import Processes
from test_pool_processes import do_as_asked
if __name__ == "__main__":
    with Processes(do_as_asked, 2) as pool:
        list(pool.run([("sleep", f"{sys.argv[1]}/{name}.pid") for name in "ab"]))
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks Linux for processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_one_that_asked(tmp_path: Path, number: int) -> None:
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    command = [sys.executable, str(tmp_path / "sleepers.py"), str(tmp_path)]
    asking = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(kept := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    pids = [int(path.read_text()) for path in kept]
    assert len(pids) == 2
    assert all(map(alive, pids))
    if number == signal.SIGINT:  # as a terminal does: all processes of the group
        os.killpg(asking.pid, number)
    else:
        asking.send_signal(number)
    _, said = asking.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))
    assert said.count(b"Traceback") <= 1, "a process of the pool says nothing of a Ctrl-C"
