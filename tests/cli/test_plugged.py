"""Commands that other packages bring."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from refusals import refused
from typer.testing import CliRunner

from bract.cli import main
from bract.cli.main import app
from bract.installed import plugins

FUNCTION = '''
def greet(name: str = "you"):
    """Greet somebody."""
    print(f"hello {name}")
'''
APP = """
import typer
app = typer.Typer()
@app.command()
def one(): print("one of two")
@app.command()
def two(): print("two of two")
"""

Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Put a package with one module and its commands on the path, as pip would."""
    packages: list[str] = []

    def put(package: str, module: str, **entries: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nSummary: What [it] does.\n"
        (info / "METADATA").write_text(head)
        lines = "".join(f"{key} = {package}:{value}\n" for key, value in entries.items())
        (info / "entry_points.txt").write_text(f"[bract.commands]\n{lines}")
        (tmp_path / f"{package}.py").write_text(module)
        packages.append(package)

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for package in packages:
        sys.modules.pop(package, None)


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def test_help_lists_a_command_without_importing_it(put: Put) -> None:
    put("theirs_listed", FUNCTION, greet="greet")
    said = typed("--help").output
    assert "other packages" in said
    (line,) = [line for line in said.splitlines() if " greet " in line]
    assert "[it]" in line
    assert "theirs_listed" not in sys.modules


def test_a_function_and_an_app_are_commands(put: Put) -> None:
    put("theirs_called", FUNCTION + APP, greet="greet", several="app")
    assert typed("greet", "--name", "Ada").output == "hello Ada\n"
    assert typed("several", "two").output == "two of two\n"
    assert "--install-completion" not in typed("several", "--help").output
    assert "Greet" in typed("greet", "--help").output


@pytest.mark.parametrize("status", [0, 3])
def test_a_command_ends_with_the_status_that_it_says(
    put: Put, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"theirs_ending_{status}", f"import sys\ndef halt(): sys.exit({status})\n", halt="halt")
    monkeypatch.setattr(sys, "argv", ["bract", "halt"])
    with pytest.raises(SystemExit) as end:
        main._run(app, "bract")  # without the handlers of signals, which outlive a test
    assert (end.value.code or 0) == status


def test_a_taken_name_is_left_to_bract_s_own_command(
    put: Put, caplog: pytest.LogCaptureFixture
) -> None:
    put("theirs_taken", FUNCTION, report="greet")
    group: Any = typer.main.get_command(app)
    with caplog.at_level(logging.WARNING):
        assert group.every_command()["report"] is group.commands["report"]
    (warning,) = caplog.messages
    assert "theirs_taken 1.0" in warning and "report" in warning
    assert "report.html" in typed("report", "--help").output


@pytest.mark.parametrize("module", ["greet = 3\n", "import no_such_module\n", "other = 1\n"])
def test_what_is_no_command_is_refused_by_its_package(put: Put, module: str) -> None:
    put("theirs_odd", module, greet="greet")
    with refused("plugin-faulty", "greet", "theirs_odd"):
        raise_from(typed("greet"))
    assert typed("schema", "--help").exit_code == 0


def test_a_command_that_is_not_installed_names_the_line_that_installs_it(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("theirs_only", FUNCTION)  # so that packages are looked for anew
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    (line,) = [line for line in typed("--help").output.splitlines() if " harden " in line]
    assert "'bract[harden]'" in line
    with refused("package-missing", "harden", "bract[harden]", "plugins/bract-harden"):
        raise_from(typed("harden", "federation.yaml"))


def test_a_mistyped_command_of_another_package_is_suggested(put: Put) -> None:
    put("theirs_near", FUNCTION, greet="greet")
    assert "greet" in typed("gret").output


def raise_from(result: Result) -> None:
    if result.exception is not None:
        raise result.exception
