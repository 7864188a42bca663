"""Writes that fail or stop half-way: what was there stays, and what is said names the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.attacks.solve.checkpoints import write_atomically
from bract.cli.main import main
from bract.disk import append_line, write_text
from bract.errors import WriteFailedError
from bract.inputs.image import Image
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow

PICTURE = torch.zeros(1, 64, 64)

WRITES: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: write_text(folder / "it", "new"),
    "a picture of an audit": lambda folder: Image().save(PICTURE, folder / "it.json", 0, "found"),
    "the state of an attack": lambda folder: write_atomically(folder / "it.part", {"a": PICTURE}),
    "a line": lambda folder: append_line(folder / "it", "{}"),
}


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes what fits a buffer and refuses it when it is to be kept."""

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.parametrize("what", WRITES)
def test_a_full_disk_is_named_with_what_was_needed_and_is_free(
    what: str, tmp_path: Path, full_disk: None
) -> None:
    with refused("write-failed", tmp_path):
        WRITES[what](tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] in ([], [b""])


def test_a_report_on_a_full_disk_leaves_the_earlier_one(tmp_path: Path, full_disk: None) -> None:
    (tmp_path / "captures").mkdir()
    for name in ("report.html", "report.json"):
        (tmp_path / name).write_text("earlier")
    with refused("write-failed", "report.json"):
        write_report(tmp_path)
    held = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert held == {"report.html": "earlier", "report.json": "earlier"}


def test_the_command_fails_with_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "somewhere"))

    monkeypatch.setattr("bract.cli.main.app", fail)
    monkeypatch.setattr("bract.cli.main.listen", lambda: None)
    with pytest.raises(SystemExit) as left:
        main()
    (said,) = capfd.readouterr().err.splitlines()
    assert left.value.code == 1
    assert "somewhere: cannot be written: the disk is full; free some space (" in said
    assert said.endswith(" free)")


def row(number: int) -> MetricsRow:
    return MetricsRow(round=number, seconds=0.5)


def rounds(run: RunDirectory) -> list[int]:
    return [found.round for found in run.metrics()]


def test_a_line_cut_at_any_byte_loses_itself_only_and_the_next_one_does_not_continue_it(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path)
    for number in range(3):
        run.append_metrics(row(number))
    whole = run.metrics_path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start, len(whole)):
        run.metrics_path.write_bytes(whole[:cut])
        # A line that lacks nothing but its end was written.
        kept = [0, 1, 2] if cut == len(whole) - 1 else [0, 1]
        assert rounds(run) == kept
        run.append_metrics(row(7))
        assert rounds(run) == [*kept, 7]
        assert run.metrics_path.read_bytes().count(b"\n") == len(kept) + 1


def test_a_broken_line_in_the_middle_hides_no_later_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(row(1))
    with run.metrics_path.open("a") as file:
        file.write('{"schema": 3, "rou\n')
    run.append_metrics(row(2))
    assert rounds(run) == [1, 2]


def test_a_line_of_more_than_a_block_is_cut_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, '"first"')
    with path.open("a") as file:
        file.write('"' + "x" * 200_000)
    append_line(path, '"second"')
    assert path.read_text() == '"first"\n"second"\n'


def test_an_append_that_fails_half_way_leaves_the_lines_before_it(
    tmp_path: Path, full_disk: None
) -> None:
    path = tmp_path / "lines"
    path.write_text('"first"\n')
    with pytest.raises(WriteFailedError):
        append_line(path, '"second"')
    assert path.read_text() == '"first"\n'


def test_run_json_is_the_earlier_one_while_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.update_state(status="running", name="mine")
    seen = []

    def killed(_: Any) -> None:
        seen.append(run.state().status)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        run.update_state(status="finished")
    assert seen == ["running"]
    assert run.state().status == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
