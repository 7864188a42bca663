"""Continuous integration with and without a Docker engine, and what a release requires."""

import os
import subprocess
from pathlib import Path

import pytest
from containers import ROOT


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--required"], 1)])
def test_without_an_engine_the_container_tests_are_left_out_or_fail_where_required(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "containers", *arguments],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert "no Docker engine answers" in done.stderr


def test_a_release_requires_the_container_tests_before_it_builds() -> None:
    lines = (ROOT / ".ci" / "release").read_text().splitlines()
    required = next(
        i for i, line in enumerate(lines) if line.startswith(".ci/containers --required")
    )
    assert "|| fail" in lines[required]
    assert required < next(i for i, line in enumerate(lines) if "-m build" in line)
