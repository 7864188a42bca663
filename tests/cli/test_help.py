"""The command line explains itself: help, examples, completion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import GROUP, parse
from typer.testing import CliRunner

from bract.cli import groups
from bract.cli.examples import examples_in
from bract.cli.main import app


def commands(group: Any = GROUP, before: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield " ".join((*before, name)), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_has_help_that_is_shown(name: str) -> None:
    shown = " ".join(
        CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "300"}).output.split()
    )
    for parameter in COMMANDS[name].params:
        text = getattr(parameter, "help", None)
        assert text, f"{name}: {parameter.name}"
        assert " ".join(text.split())[:60] in shown, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "300"}).output
    lines = examples_in(COMMANDS[name].epilog)
    assert lines
    for line in lines:
        assert line.startswith(f"bract {name}")
        assert f"$ {line}" in shown
        parse(line)


def test_commands_that_print_results_take_a_format() -> None:
    # The others serve until they are stopped, or write files that they name.
    silent = {"init", "superlink", "superexec", "supernode", "provision", "stop", "pack"}
    silent |= {"site add", "site revoke", "site renew", "site register"}
    silent |= {"site request", "site accept", "site backup", "site restore"}
    for name, command in COMMANDS.items():
        assert ("output" in {p.name for p in command.params}) == (name not in silent), name


def complete(words: str, tmp_path: Path) -> list[str]:
    parts = words.split(" ")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bract.cli.main"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {
            "_BRACT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(parts) - 1),
        },
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.processes
def test_the_shell_completes_commands_and_choices(tmp_path: Path) -> None:
    assert complete("bract rep", tmp_path) == ["report"]
    assert complete("bract init --template en", tmp_path) == ["encrypted"]
    assert complete("bract policy ", tmp_path) == ["check"]


@pytest.mark.processes
@pytest.mark.parametrize("line", ["--help", "harden --help", "report --help"])
def test_a_reader_that_goes_away_ends_a_command_without_a_word(line: str) -> None:
    bract = subprocess.Popen(
        [sys.executable, "-m", "bract.cli.main", *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert bract.stdout is not None
    bract.stdout.close()
    assert bract.communicate(timeout=120)[1] == b""
    assert bract.returncode == 1


def test_completion_is_installed_by_the_command_itself() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "--install-completion" in said


def test_every_command_for_people_is_listed() -> None:
    listed = {name for names in groups.GROUPS.values() for name in names}
    own = {name.partition(" ")[0] for name in COMMANDS}
    assert own - listed == {"superexec"}, "Flower's processes start it; people do not"
