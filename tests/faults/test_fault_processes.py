"""Break one thing in a running federation and look at what is left.

Every fault ends in a completed run, or in one line and an exit code that tells; no process is left,
``run.json`` is true, and `--resume` finishes the run. The seconds that each took are printed
(pytest -s): they are a table of docs/measured/earlier-faults.md.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from breaking import CONFIG, Broken, measured
from test_processes import Command

from bract.rundir import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.faults]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_stops_the_run_with_one_line_that_says_how_to_go_on(
    name: str, tmp_path: Path
) -> None:
    number = signal.Signals[name]
    inherited = signal.signal(number, signal.SIG_DFL)  # tests that run below `nohup` ignore SIGHUP
    broken = Broken(tmp_path)
    signal.signal(number, inherited)
    broken.wait()
    broken.command.process.send_signal(number)
    code, said, seconds = broken.end()
    measured(f"{name} to `bract run`", code, seconds, said)
    assert code == 128 + number
    assert said.startswith(f"stopped by {name}: runs/broken after round ")
    assert said.endswith("go on with `bract run f.yaml --resume`")
    assert broken.run.state().status == "interrupted"
    assert broken.command.nothing_is_left()


def test_a_live_run_refuses_a_second_writer_and_outlives_its_reaper(tmp_path: Path) -> None:
    broken = Broken(tmp_path)
    broken.wait()
    pid = broken.command.process.pid
    for words in (("run", "f.yaml", "--resume"), ("audit", "runs/broken")):
        begun = time.monotonic()
        code, said = Command(tmp_path, *words).finish()
        line = said.strip().splitlines()[-1]
        measured(
            f"`bract {' '.join(words)}` beside a live run", code, time.monotonic() - begun, line
        )
        assert code == 2
        assert f"process {pid} (" in line and "is working on it" in line
    reapers = [p for p in broken.command.descendants() if "bract.cli.launch.reaper" in p.cmdline()]
    assert len(reapers) == 1
    reapers[0].kill()
    broken.wait(max(broken.rounds()) + 2)
    assert broken.command.process.poll() is None
    broken.command.process.send_signal(signal.SIGINT)
    code, said, seconds = broken.end()
    measured("SIGKILL to the reaper, then Ctrl-C", code, seconds, said)
    assert code == 130
    assert broken.run.state().status == "interrupted"
    broken.finish()


def test_a_killed_launcher_leaves_a_true_state_and_a_run_that_resumes(tmp_path: Path) -> None:
    broken = Broken(tmp_path)
    broken.wait(0)
    begun = time.monotonic()
    broken.command.process.kill()
    broken.command.finish()
    assert broken.command.nothing_is_left(30)
    seconds = time.monotonic() - begun
    assert broken.run.state().status == "interrupted"
    measured("SIGKILL to `bract run` after round 0", -9, seconds, "run.json: interrupted")
    broken.finish()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("the SuperLink", "superlink was ended by SIGKILL"),
        ("the server app", "the server app was ended from outside after round "),
        ("a SuperNode", "client-0 was ended by SIGKILL"),
    ],
)
def test_a_killed_process_fails_the_run_with_one_line(
    what: str, message: str, tmp_path: Path
) -> None:
    broken = Broken(tmp_path)
    broken.wait()
    if what == "the server app":
        # The lock says who trains; forked, it has the fork server's command line.
        victim = psutil.Process(json.loads(broken.run.server_lock_path.read_text())["pid"])
    elif what == "the SuperLink":
        victim = broken.process("superlink.log", "flower-superlink")
    else:
        victim = broken.process("client-0.log", "flower-supernode")
    victim.kill()
    code, said, seconds = broken.end()
    measured(f"SIGKILL to {what}", code, seconds, said)
    assert code == 1
    assert said.startswith(f"error: {message}")
    state = broken.run.state()
    assert state.status == "failed" and f"error: {state.error}" == said
    broken.finish()


def test_places_with_strange_names_are_none(tmp_path: Path) -> None:
    """A long TMPDIR, a run directory beyond ASCII, and a Python that is told to know only that."""
    folder = tmp_path / "größe-数"
    long = tmp_path / ("t" * 120)
    for place in (folder, long):
        place.mkdir()
    (folder / "f.yaml").write_text(CONFIG.format(rounds=1, captured=[1]))
    plain = {"TMPDIR": str(long), "LC_ALL": "C", "PYTHONUTF8": "0"}
    runs = str(tmp_path / "läufe")
    begun = time.monotonic()
    command = Command(folder, "run", "f.yaml", "--runs", runs, **plain)
    code, said = command.finish()
    measured("long TMPDIR, LC_ALL=C PYTHONUTF8=0", code, time.monotonic() - begun, "")
    assert code == 0, said
    assert command.nothing_is_left()
    run = RunDirectory(tmp_path / "läufe" / "broken")
    assert run.state().status == "finished"
    code, said = Command(folder, "report", f"{runs}/broken", "--format", "json", **plain).finish()
    assert code == 0, said
    assert (run.root / "report.html").is_file()


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root"
)
def test_a_tmpdir_from_which_nothing_can_be_executed_is_enough(tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    mount = 'mount -t tmpfs -o noexec,size=64m none "$TMPDIR" && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", mount, "sh")
    tried = subprocess.run([*before, "true"], env={**os.environ, "TMPDIR": str(place)}, check=False)
    if tried.returncode:
        pytest.skip("this container may not mount")
    (tmp_path / "f.yaml").write_text(CONFIG.format(rounds=1, captured=[1]))
    begun = time.monotonic()
    command = Command(tmp_path, "run", "f.yaml", before=before, TMPDIR=str(place))
    code, said = command.finish()
    measured("TMPDIR mounted noexec", code, time.monotonic() - begun, "")
    assert code == 0, said
    assert command.nothing_is_left()
