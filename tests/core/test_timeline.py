"""Spans of several processes become one trace."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from bract.process import timeline


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    noted = tmp_path / "profile"
    noted.mkdir()
    monkeypatch.setenv(timeline.FOLDER, str(noted))
    monkeypatch.setenv(timeline.PARTY, "client-0")
    monkeypatch.setattr(sys, "argv", ["/somewhere/flwr-clientapp"])
    return noted


def test_spans_are_sorted_from_the_first_one_on_and_name_their_process(
    folder: Path, tmp_path: Path
) -> None:
    later = {"name": "aggregate", "pid": 7, "ts": 5_000_000, "dur": 20, "process": "server"}
    earlier = {"name": "train", "pid": 8, "ts": 4_000_000, "dur": 900, "process": "client-0"}
    (folder / "7.jsonl").write_text(json.dumps(later) + "\n")
    (folder / "8.jsonl").write_text(json.dumps(earlier) + '\n{"name": "killed in the mid')
    written = json.loads(timeline.merge(folder, tmp_path / "profile.json").read_text())
    assert written["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 8, "args": {"name": "client-0"}},
        {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "server"}},
        {"name": "train", "pid": 8, "tid": 8, "ph": "X", "ts": 0, "dur": 900},
        {"name": "aggregate", "pid": 7, "tid": 7, "ph": "X", "ts": 1_000_000, "dur": 20},
    ]
    assert not folder.exists()


def test_a_span_is_as_long_as_its_block_also_where_it_raises(folder: Path) -> None:
    def work() -> None:
        time.sleep(0.02)
        raise ValueError

    with pytest.raises(ValueError), timeline.span("work"):
        work()
    (line,) = (folder / f"{os.getpid()}.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["name"] == "work"
    assert found["process"] == "client-0 flwr-clientapp"
    assert 20_000 <= found["dur"] < 2_000_000


def test_nothing_is_noted_where_no_profile_is_wanted_or_its_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(timeline.FOLDER, str(folder / "gone"))
    with timeline.span("work"):
        pass
    monkeypatch.delenv(timeline.FOLDER)
    with timeline.span("work"):
        pass
    assert list(folder.iterdir()) == []
