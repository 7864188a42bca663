"""Workers: what they find, that a dead one costs its job alone, and that none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bract.config import FederationConfig, build_config
from bract_harden.configuration import InProcess
from bract_harden.records import Candidate
from bract_harden.search import Hardening
from bract_harden.space import Space, SpaceFile
from bract_harden.work import Job
from bract_harden.workers import workers

pytest.importorskip("optuna")

pytestmark = pytest.mark.processes

BASE = {
    "name": "small",
    "truth": True,
    "rounds": 1,
    "clients": 2,
    "data": {
        "image_size": 8,
        "validation": 0.0,
        "partition": {"kind": "sizes", "sizes": [40, 2]},
    },
    "model": {"name": "lenet-strided", "activation": "sigmoid"},
    "training": {"batch_size": 2},
    "audit": {"attacks": ["ig"], "clients": ["client-1"], "rounds": [1], "iterations": 10},
}
SPACE = {
    "space": {"training.lr": [0.05, 0.1]},
    "defenses": [[], [{"name": "pruning", "ratio": {"low": 0.5, "high": 0.9}}]],
    "constraints": {"accuracy_loss": 0.5, "leak": None},
    "search": {
        **{"trials": 3, "seeds": 1, "points": 1},
        **{"cheap": {"iterations": 3}, "middle": {"iterations": 5}},
    },
}


class Odd:
    """Does what a job's settings ask for in place of an attack."""

    def train(self, config: FederationConfig, root: Path) -> float:
        root.mkdir(parents=True)
        (root / "pid").write_text(f"{os.getpid()} {torch.get_num_threads()}")
        return 1.0

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        if settings["do"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if settings["do"] == "leave":
            os._exit(7)
        if settings["do"] == "sleep":
            time.sleep(600)
        raise RuntimeError("done")


def job(root: Path, name: str, do: str) -> Job:
    return Job(name, build_config({}), root / name / "seed-0", 0, {"do": do})


def odd_jobs(root: Path, *asked: str) -> list[Job]:
    return [job(root, f"{i}-{do}", do) for i, do in enumerate(asked)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def searched(root: Path, count: int) -> list[Candidate]:
    root.mkdir()
    base = build_config(BASE).as_own_word()
    space = Space(base, SpaceFile.model_validate(SPACE))
    with workers(InProcess(base), count) as pool:
        search = Hardening(root, space, pool, say=lambda line: None)
        search.run()
    assert search.frontier(full=True)
    return search.candidates


def test_two_workers_find_what_one_finds(tmp_path: Path) -> None:
    one, two = searched(tmp_path / "one", 1), searched(tmp_path / "two", 2)

    def facts(found: list[Candidate]) -> list[Any]:
        return [(c.name, c.stage, c.accuracy, c.leak, c.leaks, len(c.measures)) for c in found]

    first, second = ({c.name: c for c in found} for found in (one, two))
    assert set(first) == set(second)
    for name in first:
        assert first[name].setting == second[name].setting
        assert first[name].accuracy == second[name].accuracy or (
            first[name].stage != second[name].stage
        )
    same = [n for n in first if first[n].stage == second[n].stage]
    assert same
    assert facts([first[n] for n in same]) == facts([second[n] for n in same])


def test_a_worker_that_dies_costs_its_job_alone(tmp_path: Path) -> None:
    with workers(Odd(), 2) as pool:
        jobs = odd_jobs(tmp_path, "die", "leave", "fail", "fail")
        found = {job.candidate: outcome for job, outcome in pool.run(jobs)}
    assert found["0-die"].error == "its worker process was ended by signal 9 (Killed)"
    assert found["1-leave"].error == "its worker process ended with exit code 7"
    assert found["2-fail"].error == found["3-fail"].error == "RuntimeError: done"
    assert all((job.run / "pid").read_text().endswith(" 1") for job in jobs), "one thread each"


def test_an_idle_worker_that_died_is_replaced(tmp_path: Path) -> None:
    with workers(Odd(), 1) as pool:
        (first,) = pool.run([job(tmp_path, "first", "fail")])
        pid = int((first[0].run / "pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        while alive(pid):  # a busy machine takes its time
            time.sleep(0.05)
        (second,) = pool.run([job(tmp_path, "second", "fail")])
    assert second[1].error == "RuntimeError: done"


def test_a_job_that_a_dying_worker_never_began_goes_to_another(tmp_path: Path) -> None:
    with workers(Odd(), 1) as pool:
        (first,) = pool.run([job(tmp_path, "first", "fail")])
        pid = int((first[0].run / "pid").read_text().split()[0])
        os.kill(pid, signal.SIGSTOP)  # its pipe still takes the job
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        (second,) = pool.run([job(tmp_path, "second", "fail")])
    assert second[1].error == "RuntimeError: done"


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
        return state != "Z"
    return False


SLEEPERS = """
import sys
from pathlib import Path
from bract_harden.workers import workers
from test_harden_workers import Odd, odd_jobs
if __name__ == "__main__":
    with workers(Odd(), 2) as crew:
        list(crew.run(odd_jobs(Path(sys.argv[1]), "sleep", "sleep")))
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks Linux for processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_the_search(tmp_path: Path, number: int) -> None:
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    command = [sys.executable, str(tmp_path / "sleepers.py"), str(tmp_path)]
    search = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(kept := list(tmp_path.glob("*/seed-0/pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    pids = [int(path.read_text().split()[0]) for path in kept]
    assert len(pids) == 2
    assert all(map(alive, pids))
    if number == signal.SIGINT:  # as a terminal does: all processes of the group
        os.killpg(search.pid, number)
    else:
        search.send_signal(number)
    _, said = search.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))
    assert said.count(b"Traceback") <= 1, "a worker says nothing of a Ctrl-C"
