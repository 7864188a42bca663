"""An audit in processes and on a real Ray: equal results, a killed worker, Ctrl-C, an address."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from audited import audited_run
from refusals import check_named
from test_processes import Command

from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes
with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")

ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, run: str, iterations: int, *more: str) -> Command:
    words = ("audit", run, "--attack", "ig", "--set", "audit.batch=2", "--budget", str(iterations))
    return Command(folder, *words, "--yes", *more, **ONE_THREAD)


def written(root: Path) -> dict[str, Any]:
    """Return every file of an audit, without what a clock said."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if k != "seconds" or isinstance(v, dict)}
            return {k: timeless(v) for k, v in kept.items() if k != "made"}
        return [timeless(v) for v in value] if isinstance(value, list) else value

    files = {str(p.relative_to(root)): p.read_bytes() for p in (root / "audit").rglob("*.*")}
    return {k: timeless(json.loads(v)) if k.endswith("json") else v for k, v in files.items()}


def is_worker(process: psutil.Process) -> bool:
    try:
        return bool(re.search("ray::Worker|spawn_main", " ".join(process.cmdline())))
    except psutil.Error:  # it has ended
        return False


def wait_for_workers(command: Command, root: Path, count: int) -> list[psutil.Process]:
    """Wait until so many workers attack; return their processes."""
    deadline = time.monotonic() + 90
    while True:
        # Each has a folder for as long as it has a batch, and its state in it once it attacks. Ray
        # names its processes while they work, so that one may bear another name for a moment.
        attacking = len(list((root / ".workers").glob("*/*/unfinished")))
        found = [p for p in command.descendants() if is_worker(p)]
        if attacking >= count and len(found) == count:
            return found
        assert command.process.poll() is None, command.finish()
        assert time.monotonic() < deadline, "no worker attacks after 90 s"
        time.sleep(0.02)


@pytest.mark.parametrize("ray", [(), pytest.param(("--ray", "auto"), marks=with_ray)])
def test_two_workers_write_to_the_last_bit_what_one_process_writes_though_one_is_killed(
    ray: tuple[str, ...], tmp_path: Path
) -> None:
    audited_run(tmp_path / "one", uploads=6)
    shutil.copytree(tmp_path / "one", tmp_path / "many", copy_function=shutil.copy2)
    code, errors = start(tmp_path, "one", 800, "--set", "audit.workers=1").finish()
    assert code == 0, errors
    command = start(tmp_path, "many", 800, *ray, "--set", "audit.workers=2")
    wait_for_workers(command, tmp_path / "many", 2)[0].kill()
    code, errors = command.finish()
    assert code == 0, errors
    assert errors.count("a worker was lost with ig on round-0001/client-") == 1
    assert "Traceback" not in errors
    assert command.nothing_is_left()
    one, many = written(tmp_path / "one"), written(tmp_path / "many")
    assert len([name for name in one if name.endswith(".json")]) == 6
    assert one == many
    assert not (tmp_path / "many" / ".workers").exists()


@with_ray
def test_ctrl_c_leaves_no_process_and_resume_goes_on(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", uploads=3)
    command = start(tmp_path, "run", 1_000_000, "--ray", "auto", "--set", "audit.workers=2")
    wait_for_workers(command, run.root, 2)
    assert_only_this_machine_reaches(command.descendants())
    command.process.send_signal(signal.SIGINT)
    code, errors = command.finish(60)
    assert code == 130, errors
    assert "Traceback" not in errors and "--resume" in errors
    assert command.nothing_is_left()
    assert not (run.root / ".workers").exists()
    killed = start(
        tmp_path, "run", 1_000_000, "--ray", "auto", "--set", "audit.workers=1", "--resume"
    )
    wait_for_workers(killed, run.root, 1)
    killed.process.kill()
    killed.finish()
    assert killed.nothing_is_left(30)
    code, errors = start(tmp_path, "run", 3, "--resume").finish()
    assert code == 0, errors
    assert len(list((RunDirectory(run.root).audit / "ig").glob("*.json"))) == 3


def test_ctrl_c_ends_processes_of_this_machine(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", uploads=3)
    command = start(tmp_path, "run", 1_000_000, "--set", "audit.workers=2")
    wait_for_workers(command, run.root, 2)
    command.process.send_signal(signal.SIGINT)
    code, errors = command.finish(60)
    assert code == 130, errors
    assert "Traceback" not in errors and "--resume" in errors
    assert command.nothing_is_left()
    assert not (run.root / ".workers").exists()


def assert_only_this_machine_reaches(processes: list[psutil.Process]) -> None:
    addresses = set()
    for process in processes:
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                addresses.add(found.laddr.ip)
    assert addresses
    assert {a.removeprefix("::ffff:") for a in addresses} <= {"127.0.0.1", "::1"}


@with_ray
def test_an_address_where_nobody_answers_is_one_error(tmp_path: Path) -> None:
    audited_run(tmp_path / "run", uploads=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        command = start(tmp_path, "run", 3, "--ray", f"127.0.0.1:{port}")
        code, errors = command.finish()
    assert code == 2
    (said,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    check_named(said, "--ray", f"127.0.0.1:{port}")
    assert "Traceback" not in errors
    assert command.nothing_is_left()
    assert not (tmp_path / "run" / "audit").exists()
