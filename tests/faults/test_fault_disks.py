"""Disks that are full, and captures that are gone or may not be written, under real commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from breaking import Broken, measured
from encrypted_runs import small, small_grid, train
from test_processes import Command

from bract import ObservationStore
from bract.audit.uncaptured import read_missed
from bract.rundir import RunDirectory
from bract.schema import AuditResult

pytestmark = [pytest.mark.processes, pytest.mark.faults]

ROOT = os.getuid() == 0
LIMIT = 300
"""Bytes of the largest file that fits on the full disk."""


@contextlib.contextmanager
def read_only(folder: Path, pid: int) -> Iterator[None]:
    """Let a process write nothing into a folder; permissions alone do not stop root."""
    inside = ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]
    if ROOT:
        subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "ro", "none", folder], check=True)
    else:
        folder.chmod(0o500)
    yield
    if ROOT:
        # A writer that looks at the folder keeps it busy for a moment.
        subprocess.run([*inside, "umount", "--lazy", folder], check=True)
    else:
        folder.chmod(0o700)


def test_captures_that_are_deleted_or_refused_cost_the_run_nothing_else(tmp_path: Path) -> None:
    before = ("unshare", "--mount") if ROOT else ()
    if before and subprocess.run([*before, "true"], check=False).returncode:
        pytest.skip("this container may not mount")
    broken = Broken(tmp_path, captured="null", before=before)
    broken.wait()
    captures, run = broken.run.captures, broken.run

    def later(rounds: int) -> int:
        """Wait for more rounds; the first of them may have begun before what was done last."""
        broken.wait(max(broken.rounds()) + rounds)
        return max(broken.rounds())

    shutil.rmtree(captures, ignore_errors=True)
    deleted = later(3)
    assert (captures / f"round-{deleted:04d}").is_dir() or (
        captures / f"round-{deleted - 1:04d}"
    ).is_dir()
    with read_only(captures, broken.command.process.pid):
        first = max(broken.rounds())
        refused = later(3)
    last = later(3)
    broken.command.process.send_signal(signal.SIGTERM)
    code, said, seconds = broken.end()
    measured("captures deleted, then read-only", code, seconds, said)
    assert code == 128 + signal.SIGTERM
    assert broken.rounds() == list(range(max(broken.rounds()) + 1))
    assert not any(row.failures for row in run.metrics())
    missed = {entry.round for entry in read_missed(captures)}
    captured = {observation.round for observation in ObservationStore(captures)}
    assert set(range(first + 2, refused)) <= missed
    assert not missed & captured
    assert set(range(refused + 2, last)) <= captured


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    """A run that was trained without processes."""
    config = small(
        data={"image_size": 16, "validation": 0.0},
        model={"name": "lenet-strided", "activation": "relu"},
        training={"local_steps": 1, "batch_size": 2},
    )
    run = train(tmp_path, config, small_grid(tmp_path, config))
    run.update_state(status="finished", name="small")
    return run


def on_full_disk(*command: str, folder: Path) -> tuple[int, list[str], float]:
    begun = time.monotonic()
    started = Command(
        folder,
        *command,
        before=("prlimit", f"--fsize={LIMIT}"),
        # Compiled modules would be cut off at the limit, and later processes read them.
        PYTHONDONTWRITEBYTECODE="1",
    )
    code, said = started.finish()
    assert "Traceback" not in said
    assert started.nothing_is_left()
    return code, said.strip().splitlines(), time.monotonic() - begun


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_an_audit_and_a_report_on_a_full_disk_are_done_when_there_is_room(
    tmp_path: Path, finished: RunDirectory
) -> None:
    name = finished.root.name
    chosen = ("--attack", "ig", "--budget", "5", "--restarts", "1", "--yes")
    code, said, seconds = on_full_disk("audit", name, *chosen, folder=tmp_path)
    measured("`bract audit` on a full disk", code, seconds, said[-1])
    assert code == 1
    assert said[-1].startswith("error: ")
    assert "cannot be written" in said[-1] and "free)" in said[-1]
    code, errors = Command(tmp_path, "audit", name, *chosen, "--resume").finish()
    assert code == 0, errors
    results = [
        AuditResult.parse_text(path.read_text(), source=path.name)
        for path in (finished.root / "audit").rglob("*.json")
    ]
    assert {result.client for result in results} == {"client-0", "client-1", "client-2"}
    code, errors = Command(tmp_path, "report", name).finish()
    assert code == 0, errors
    page = (finished.root / "report.html").read_bytes()
    code, said, seconds = on_full_disk("report", name, folder=tmp_path)
    measured("`bract report` on a full disk", code, seconds, said[-1])
    assert code == 1
    assert "cannot be written" in said[-1] and "free)" in said[-1]
    assert (finished.root / "report.html").read_bytes() == page
    assert not list(finished.root.glob(".*.tmp"))
