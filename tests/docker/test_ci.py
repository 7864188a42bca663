"""Continuous integration with and without a Docker engine, and what a release requires."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from containers import ROOT

ENGINE = """#!/bin/sh
case "$1 $2" in "image inspect") exit {base} ;; "pull "*) exit 1 ;; esac
"""


def run_ci(folder: Path, *arguments: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/containers with these programs first on the path."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci" / "containers", *arguments],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--required"], 1)])
def test_without_an_engine_the_container_tests_are_left_out_or_fail_where_required(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = run_ci(tmp_path, *arguments, docker="#!/bin/sh\nexit 1\n")
    assert done.returncode == code
    assert "no Docker engine answers" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [0, 2])
def test_with_an_engine_the_container_tests_decide(code: int, tmp_path: Path) -> None:
    engine = ENGINE.format(base=0)
    done = run_ci(tmp_path, docker=engine, make=f'#!/bin/sh\necho "ran $*"\nexit {code}\n')
    assert "ran containers" in done.stdout
    assert done.returncode == (1 if code else 0)
    assert bool(done.stderr) == bool(code)


def test_with_an_engine_a_base_image_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    refused = "#!/bin/sh\nexit 1\n"
    done = run_ci(tmp_path, docker=ENGINE.format(base=1), debootstrap=refused, make=refused)
    assert done.returncode == 1
    assert "base image" in done.stderr


PARTS = ("test", "thorough", "docs", "federations", "flower", "faults", "containers")


def continuous_integration(
    folder: Path, *, failing: str = "", engine: bool = True
) -> tuple[int, list[str], str]:
    """Run ``.ci/run`` where `make` notes its target; return exit code, targets and output."""
    noted = folder / "made"
    make = f'#!/bin/sh\necho "$1" >> {noted}\n[ "$1" != "{failing}" ]\n'
    for name, text in {
        "make": make,
        "chromium": "#!/bin/sh\n",
        "docker": f"#!/bin/sh\nexit {0 if engine else 1}\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / ".ci" / "run"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, noted.read_text().split(), done.stdout


def test_every_part_is_run_and_what_is_left_out_is_named_in_the_last_line(tmp_path: Path) -> None:
    code, made, said = continuous_integration(tmp_path)
    assert (code, made) == (0, list(PARTS))
    last = said.splitlines()[-1]
    assert "make slow" in last and "make stranger" in last and "containers" not in last


def test_without_an_engine_containers_are_named_as_left_out(tmp_path: Path) -> None:
    code, made, said = continuous_integration(tmp_path, engine=False)
    assert (code, made) == (0, [part for part in PARTS if part != "containers"])
    assert "make containers" in said.splitlines()[-1]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_fails_the_run(part: str, tmp_path: Path) -> None:
    code, made, said = continuous_integration(tmp_path, failing=part)
    assert code != 0
    assert made == list(PARTS[: PARTS.index(part) + 1])
    assert f"{part}" in said.splitlines()[-1]


@pytest.mark.parametrize("commands", [("true", "true"), ("false", "true"), ("true", "false")])
def test_commands_side_by_side_fail_where_one_fails(commands: tuple[str, str]) -> None:
    done = subprocess.run([ROOT / ".ci" / "side-by-side", *commands], timeout=60)
    assert (done.returncode != 0) == ("false" in commands)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_side_by_side_end_together(number: signal.Signals, tmp_path: Path) -> None:
    started = tmp_path / "pids"
    command = f"echo $$ >> {started}; exec sleep 60"
    script = subprocess.Popen(
        [ROOT / ".ci" / "side-by-side", command, command],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not started.exists() or len(started.read_text().split()) < 2:
        time.sleep(0.05)
    os.killpg(script.pid, number)  # as a terminal does, to the group of the foreground
    assert script.wait(30) == 128 + number
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(int(pid)) for pid in started.read_text().split()):
        assert time.monotonic() < deadline, "a command goes on"
        time.sleep(0.05)
