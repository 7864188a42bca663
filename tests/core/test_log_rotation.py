"""Logs are bounded, while a process goes on writing to them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from bract.process import log_to_file, logs, rotate


@pytest.mark.processes
def test_a_log_is_cut_and_its_writer_goes_on_at_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "client.log"
    code = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    with log.open("ab") as file:
        writer = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=file, text=True
        )
    assert writer.stdin is not None
    for number in range(5):
        before = log.stat().st_size
        writer.stdin.write(f"line {number} {'x' * 100}\n")
        writer.stdin.flush()
        while log.stat().st_size == before:
            assert writer.poll() is None
        rotate(log, most=50, kept=3)
    writer.stdin.close()
    writer.wait()
    assert log.read_bytes() == b""
    parts = {path.name: path.read_text().split()[1] for path in tmp_path.glob("client.log.*")}
    assert parts == {"client.log.1": "4", "client.log.2": "3", "client.log.3": "2"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("client.log.*"))


def test_a_small_log_and_one_that_is_gone_stay_as_they_are(tmp_path: Path) -> None:
    log = tmp_path / "small.log"
    log.write_text("x")
    rotate(log)
    rotate(tmp_path / "gone.log")
    assert [path.name for path in tmp_path.iterdir()] == ["small.log"]


def test_the_server_apps_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 200)
    with log_to_file(tmp_path / "server.log"):
        for number in range(100):
            logging.getLogger("bract.test").info("line %d", number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) == 1 + logs.KEPT and max(sizes.values()) <= 200
