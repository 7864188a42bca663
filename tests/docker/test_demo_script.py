"""What `make docker-demo` checks before it builds, and how a failed part ends it; no engine."""

import os
import subprocess
from pathlib import Path

import pytest
from containers import ROOT

DOCKER = """#!/bin/sh
case "$*" in
  info) exit {info} ;;
  "compose version --short") [ -n "{version}" ] && echo "{version}" ;;
  "image inspect "*) exit {base} ;;
  pull*) exit 1 ;;
esac
"""
COMPOSE = """#!/bin/sh
echo "$*" >>{log}
case "$*" in
  *" build") exit {build} ;;
  up*) for i in 1 2 3 4 5 6 7 8; do [ -e {killed} ] && exit 1; sleep {pause}; done; exit {up} ;;
  ps*) echo "superlink running 0"; echo "{client}" ;;
  kill*) touch {killed} ;;
esac
"""


def demo(
    folder: Path, state: dict[str, object], **compose: object
) -> subprocess.CompletedProcess[str]:
    """Run the script with a docker of this state, and a Compose of its own."""
    docker = folder / "docker"
    text = DOCKER.format(**{"info": 0, "version": "2.27.0", "base": 0} | state)
    docker.write_text(text)
    place = {"log": folder / "log", "killed": folder / "killed"}
    usual = {"build": 0, "up": 0, "client": "client-1 running 0", "pause": 0}
    (folder / "compose").write_text(COMPOSE.format(**place | usual | compose))
    for path in (docker, folder / "compose"):
        path.chmod(0o755)
    return subprocess.run(
        [ROOT / "docker" / "demo.sh", folder / "compose"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"info": 1}, "no Docker engine answers this user"),
        ({"version": ""}, "Docker has no Compose: install its plug-in, 2.27 or newer"),
        ({"version": "v2.26.1"}, "Docker Compose v2.26.1 is too old"),
        ({"version": "1.29.2"}, "Docker Compose 1.29.2 is too old"),
        ({"base": 1}, "sudo docker/base-image.sh python:3.11-slim-bookworm"),
    ],
)
def test_what_the_machine_lacks_is_one_line_before_anything_is_built(
    state: dict[str, object], words: str, tmp_path: Path
) -> None:
    done = demo(tmp_path, state)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("version", ["2.27.0", "v2.40.3", "5.0.1"])
def test_a_client_that_is_killed_ends_the_demo_by_its_name(version: str, tmp_path: Path) -> None:
    done = demo(tmp_path, {"version": version}, client="client-1 exited 137", pause=1)
    assert done.returncode == 1
    assert "docker-demo: client-1 ended with code 137 (killed" in done.stderr
    ran = (tmp_path / "log").read_text()
    assert "kill federation audit" in ran and "--progress quiet down" in ran


def test_a_failed_build_and_a_failed_run_are_failures_and_all_is_stopped(tmp_path: Path) -> None:
    built = demo(tmp_path, {}, build=17)
    assert built.returncode == 1 and "the images could not be built" in built.stderr
    ran = demo(tmp_path, {}, up=2)
    assert ran.returncode == 1 and "the demo ended with code 2" in ran.stderr
    assert "down --timeout" in (tmp_path / "log").read_text()
