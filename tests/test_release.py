"""What a release requires, and what of it is run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a release script and nothing to build."""
    root = tmp_path / "repository"
    (root / ".ci").mkdir(parents=True)
    shutil.copy2(ROOT / ".ci" / "release", root / ".ci" / "release")
    (root / ".gitignore").write_text("commands\nbuild\nbuilds.py\nbuilt\ncaptures\ndist\n")
    (root / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (root / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0] - 2030-01-02\n")
    (root / "CITATION.cff").write_text("version: 0.2.0\n")
    (root / "docker").mkdir()
    (root / "docker" / ".env").write_text("BRACT_VERSION=0.2.0\n")
    containers = root / ".ci" / "containers"
    containers.write_text('#!/bin/sh\necho "containers $*" >> commands\n')
    containers.chmod(0o755)
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "Change")


def release(root: Path, commands: dict[str, str] | None = None) -> Any:
    fakes = root.parent / "venv" / "bin"
    fakes.mkdir(parents=True, exist_ok=True)
    for name, body in (commands or {}).items():
        (fakes / name).write_text(f"#!/bin/sh\n{body}\n")
        (fakes / name).chmod(0o755)
    return subprocess.run(
        [root / ".ci" / "release"], capture_output=True, text=True, check=False,
        env=os.environ | {"VENV": str(fakes.parent), "PATH": f"{fakes}:{os.environ['PATH']}",
                          "STRANGERS": "3.12 /opt/python"},
    )  # fmt: skip


SAID = 'echo "$(basename $0) $*" >> commands'
"""Of a program: note what it was asked for."""

PARTS = [
    "containers --required",
    "make slow",
    "make deployment",
    "make stranger STRANGERS=3.12",
    "make stranger STRANGERS=/opt/python",
]
"""What a release requires that continuous integration leaves out."""


def parts(repository: Path) -> list[str]:
    """Return what ran since the last call, but for what a release builds and checks."""
    ran = (repository / "commands").read_text().splitlines()
    (repository / "commands").write_text("")
    return [line for line in ran if line.startswith(("make ", "containers "))]


def test_a_stranger_gets_what_no_earlier_build_left_and_names_a_python(tmp_path: Path) -> None:
    script, fake = tmp_path / ".ci" / "stranger", tmp_path / "venv" / "bin" / "python"
    left = [tmp_path / folder for folder in ("build/lib", "plugins/bract-extra/build")]
    for folder in (script.parent, fake.parent, *left):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "stranger", script)
    fake.write_text("#!/bin/sh\nexit 7\n")
    fake.chmod(0o755)

    def ended(*arguments: str) -> int:
        return subprocess.run(
            [script, *arguments],
            check=False,
            capture_output=True,
            env=os.environ | {"VENV": "venv"},
        ).returncode

    assert ended() == 2 and all(folder.is_dir() for folder in left)
    assert ended("lowest") == 7 and not any(folder.exists() for folder in left)


def test_a_stranger_has_every_environment_tried_and_names_those_that_failed(tmp_path: Path) -> None:
    script, programs, noted = tmp_path / "it" / ".ci" / "stranger", tmp_path / "bin", tmp_path / "n"
    wheel = 'case "$*" in *--wheel*) mkdir -p "$5" && touch "$5/bract-1-py3-none-any.whl" ;; esac'
    inside = tmp_path / "it" / "build" / "stranger" / "3.13" / "bin"
    for program, body in {
        programs / "python": wheel,
        programs / "uv": f'[ "$1" != venv ] || echo "$5" >> {noted}; [ "$5" != 3.12 ]',
        inside / "python": "",
        inside / "bract": "",
        tmp_path / "it" / "plugins" / "one" / "pyproject.toml": "",
    }.items():
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    script.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "stranger", script)
    done = subprocess.run(
        [script, "3.12", "3.13"], check=False, capture_output=True, text=True,
        env=os.environ | {"VENV": "..", "PATH": f"{programs}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert noted.read_text().split() == ["3.12", "3.13"]
    assert "3.13 passed" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("failed: 3.12")


def test_a_release_wants_a_tag_its_changes_and_a_clean_tree(repository: Path) -> None:
    assert "HEAD has no tag" in release(repository).stderr
    git(repository, "tag", "v0.3.0")
    assert "pyproject.toml has another version than 0.3.0" in release(repository).stderr
    (repository / "pyproject.toml").write_text('[project]\nversion = "0.3.0"\n')
    assert "not committed" in release(repository).stderr
    git(repository, "tag", "-d", "v0.3.0")
    commit(repository)
    git(repository, "tag", "v0.3.0")
    assert "no line '## [0.3.0]" in release(repository).stderr
    (repository / "CHANGELOG.md").write_text("changed\n")
    assert "not committed" in release(repository).stderr
    git(repository, "checkout", "-q", ".")
    (repository / "helper.py").touch()
    assert "?? helper.py" in release(repository).stderr


def test_a_release_wants_nothing_under_unreleased(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text(
        "## [Unreleased]\n\n### Added\n\n- More.\n\n## [0.2.0] - 2030-01-02\n\n- This.\n"
    )
    commit(repository)
    git(repository, "tag", "v0.2.0")
    assert "under Unreleased" in release(repository).stderr


BUILDS = """
import pathlib, sys
out, source = map(pathlib.Path, sys.argv[-2:])
name = source.name.replace("-", "_") if source.parent.name == "plugins" else "bract"
out.mkdir(parents=True, exist_ok=True)
for end in ("-0.2.0-py3-none-any.whl", "-0.2.0.tar.gz"):
    (out / f"{name}{end}").touch()
with open("built", "a") as file:
    file.write(" ".join(sorted(str(p.relative_to(source)) for p in source.rglob("*"))) + "\\n")
"""
"""Stands for ``python -m build``: writes what it would write, and notes which sources it saw."""


@pytest.mark.slow
def test_a_release_is_built_and_checked_and_stops_before_publishing(repository: Path) -> None:
    extra = repository / "plugins" / "bract-extra"
    extra.mkdir(parents=True)
    (extra / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    commit(repository)
    git(repository, "tag", "v0.2.0")
    (repository / "captures").mkdir()
    (repository / "captures" / "personal").write_text("of an example that was run here")
    (extra / "build").mkdir()
    (repository / "builds.py").write_text(BUILDS)
    done = release(repository, {
        "python": f'{SAID}; {sys.executable} builds.py "$@"', "twine": SAID,
        "check-wheel-contents": SAID, "make": SAID,
    })  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = (repository / "commands").read_text()
    core, plug_in = (repository / "built").read_text().splitlines()
    assert "pyproject.toml" in core and "personal" not in core and "builds.py" not in core
    assert plug_in == "pyproject.toml"
    made = [
        f"dist/0.2.0/{name}-0.2.0{end}"
        for name in ("bract", "bract_extra")
        for end in ("-py3-none-any.whl", ".tar.gz")
    ]
    assert f"twine check --strict {' '.join(made)}" in ran
    for name in ("bract", "bract_extra"):
        wheel = f"dist/0.2.0/{name}-0.2.0-py3-none-any.whl"
        assert f"check-wheel-contents --no-config --toplevel {name} {wheel}" in ran
    assert "upload" not in ran
    assert f"twine upload {' '.join(made)}" in done.stdout


@pytest.mark.parametrize("failing", PARTS[1:])
def test_a_release_started_anew_runs_the_parts_that_have_not_passed_at_its_commit(
    repository: Path, failing: str
) -> None:
    git(repository, "tag", "v0.2.0")
    fails = {"make": f'{SAID}; [ "make $*" != "{failing}" ]', "python": "exit 9"}
    done = release(repository, fails)
    assert done.returncode == 1 and "a release requires" in done.stderr
    assert parts(repository) == PARTS
    done = release(repository, {"make": SAID})
    assert done.returncode == 9
    assert parts(repository) == [failing]
    assert done.stdout.count("is not run again") == len(PARTS) - 1
    git(repository, "commit", "-q", "--allow-empty", "-m", "Change")
    git(repository, "tag", "-f", "v0.2.0")
    release(repository)
    assert parts(repository) == PARTS


def test_a_part_of_a_release_counts_for_a_day_and_not_where_make_goes_on_after_failures(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "tag", "v0.2.0")
    monkeypatch.setenv("MAKEFLAGS", "i")
    release(repository, {"make": f'{SAID}; [ -z "$MAKEFLAGS" ]', "python": "exit 9"})
    assert parts(repository) == PARTS
    notes = [path for path in (repository / "build" / "release").rglob("*") if path.is_file()]
    assert len(notes) == len(PARTS)
    for note in notes:
        os.utime(note, (note.stat().st_mtime - 90_000,) * 2)
    release(repository)
    assert parts(repository) == PARTS


def test_a_part_of_a_release_during_which_the_tree_changed_does_not_count(repository: Path) -> None:
    git(repository, "tag", "v0.2.0")
    done = release(repository, {"make": f"{SAID}; echo >> pyproject.toml"})
    assert done.returncode == 1 and "changed while slow ran" in done.stderr
    assert parts(repository) == PARTS[:2]
    git(repository, "checkout", "-q", ".")
    release(repository, {"make": SAID, "python": "exit 9"})
    assert parts(repository) == PARTS[1:]
