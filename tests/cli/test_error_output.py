"""Errors of commands: the line on stderr, and with ``--format json`` the document on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from bract.cli.console import asks_for_json, print_json
from bract.cli.error_table import page
from bract.cli.main import main
from bract.error_codes import CODES
from bract.errors import (
    BractError,
    LeakageError,
    NothingAttackedError,
    PrivacyAlarmError,
    RunFailedError,
)

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
        (PermissionError(13, "Permission denied", "a.csv"), "system-error", 1),
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
    assert code in CODES
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
    assert written == page(), "run: python -m bract.cli.error_table docs/reference/errors.md"
