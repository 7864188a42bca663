"""Errors of commands: the line on stderr, and with ``--format json`` the document on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from refusals import check_named

from bract.cli.console import asks_for_json, print_json
from bract.cli.main import main
from bract.errors import (
    BractError,
    LeakageError,
    NothingAttackedError,
    PrivacyAlarmError,
    RunFailedError,
    codes,
)
from bract.installed import references
from experiments.error_table import page

ROOT = Path(__file__).parents[2]


def ended(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, command: typer.Typer | None = None
) -> int:
    """Run a command line in this process, and return its exit code."""
    monkeypatch.setattr("sys.argv", ["bract", *arguments])
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def failing(error: BaseException, *, printed: object = None) -> typer.Typer:
    """Return a command line of one command, ``fail``, that ends with an error."""
    app = typer.Typer()

    @app.command("fail")
    def fail(output: str = typer.Option("default", "--format")) -> None:
        if printed is not None:
            print_json(printed)
        raise error

    @app.command("other")
    def other() -> None:
        pass

    return app


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (None, "file-missing", "f.yaml"),
        ("wrong: 1", "config-key", "wrong"),
        ("clients: 0", "config-value", "clients"),
        ("a: [", "text-malformed", "f.yaml"),
    ],
)
def test_a_bad_configuration_is_a_document_with_its_code(
    text: str | None,
    code: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "f.yaml"
    if text is not None:
        path.write_text(text)
    assert ended(monkeypatch, "run", str(path), "--format", "json") == 2
    out = capsys.readouterr()
    error = json.loads(out.out)["error"]
    assert error["code"] == code
    assert named in error["message"]
    assert "".join(error["message"].split()) in "".join(out.err.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "--format", "json", "--bogus"), "--bogus"),
        (("run", "--format=json"), "CONFIG"),
        (("prior", "train", "--format", "json"), "--data"),
    ],
)
def test_a_wrong_use_of_a_command_is_a_document_too(
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "usage"
    assert named in error["message"]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BractError("a.csv", code="data-empty"), "data-empty", 2),
        (RunFailedError("run 3"), "run-failed", 1),
        (RunFailedError("run 3", code="worker-failed"), "worker-failed", 1),
        (LeakageError("ssim 0.9"), "gate-crossed", 3),
        (NothingAttackedError("3 of 3"), "nothing-attacked", 4),
        (PrivacyAlarmError("epsilon 9"), "epsilon-exceeded", 5),
        (PermissionError(13, "Permission denied", "a.csv"), "system-error", 2),
        (OSError(5, "Input/output error", "a.csv"), "system-error", 1),
        (OSError(28, "No space left on device", "a.csv"), "write-failed", 1),
        (MemoryError("2 GiB"), "out-of-memory", 1),
        (ModuleNotFoundError("no", name="lpips"), "package-missing", 2),
        (ModuleNotFoundError("no", name="bract.audit"), "role-missing", 2),
    ],
)
def test_every_end_has_its_code_and_keeps_its_exit_code(
    error: BaseException,
    code: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ended(monkeypatch, "fail", "--format", "json", command=failing(error)) == status
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
    assert code in codes.CODES
    assert ended(monkeypatch, "fail", command=failing(error)) == status
    assert capsys.readouterr().out == ""


def test_a_result_that_was_printed_stays_the_only_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = failing(LeakageError("ssim 0.9"), printed={"ssim": 0.9})
    assert ended(monkeypatch, "fail", "--format", "json", command=command) == 3
    assert json.loads(capsys.readouterr().out) == {"ssim": 0.9}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("run", "--format", "json"), True),
        (("--format=json",), True),
        (("run", "--format", "default", "json"), False),
        (("json", "--format"), False),
        ((), False),
    ],
)
def test_json_is_asked_for_by_the_option_alone(arguments: Any, asked: bool) -> None:
    assert asks_for_json(arguments) is asked


def test_the_page_of_codes_is_that_of_the_table() -> None:
    written = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m experiments.error_table docs/reference/errors.md"


def theirs(folder: Path, name: str, forward: str) -> Any:
    """Return what a user's module names ``run``, imported as a model is."""
    (folder / f"{name}.py").write_text(f"import sys\n\n\ndef run():\n    {forward}\n")
    return references.import_reference(references.TrustedReference(f"{name}:run"), what="model")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("sys.exit('bye')", "SystemExit"),
        ("sys.exit(0)", "SystemExit"),
        ("assert False", "AssertionError"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("{}['a']", "KeyError"),
        ("list(next(iter(())) for _ in 'a')", "RuntimeError"),
        ("open('/no/such')", "FileNotFoundError"),
    ],
)
def test_code_that_a_user_named_ends_no_command_without_its_line(
    forward: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    run = theirs(tmp_path, f"theirs_{words.lower()}_{len(forward)}", forward)
    app = typer.Typer()
    app.command("fail")(lambda: run())
    app.command("other")(lambda: None)
    assert ended(monkeypatch, "fail", command=app) == 2
    (line,) = capsys.readouterr().err.splitlines()
    check_named(line, "line 5", words)


def test_what_other_code_prints_is_not_in_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command("fail")
    def fail(output: str = typer.Option("default", "--format")) -> None:
        print("of a model")
        print_json({"a": 1})

    app.command("other")(lambda: None)
    assert ended(monkeypatch, "fail", "--format", "json", command=app) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": 1} and "of a model" in said.err
    assert ended(monkeypatch, "fail", command=app) == 0
    assert "of a model" in capsys.readouterr().out


def test_an_error_is_one_line_whatever_name_it_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (BractError("a\nb.csv", code="data-empty"), OSError(21, "Is", "a\nb.csv")):
        assert ended(monkeypatch, "fail", command=failing(error)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "b.csv" in line
