"""Large answers wait on disk: they are read as they were sent, and memory does not grow."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bract.protocol.arrays import from_arrays
from bract.protocol.spooling import SpooledArray
from bract.server import spool
from bract.server.loopback import LoopbackGrid
from bract.server.spool import AT_ONCE, SMALLEST, SpoolingGrid

LARGE = SMALLEST // 4 + 1


def answer(number: int, values: int = LARGE) -> Message:
    arrays = ArrayRecord(
        {
            "large": Array(np.full((values,), number, dtype=np.float32)),
            "small": Array(np.arange(3, dtype=np.int64)),
        }
    )
    return Message(RecordDict({"update": arrays, "config": ConfigRecord()}), 1, "train")


class Answering:
    """A grid whose answers are made when they are asked for."""

    def __init__(self, values: int = LARGE) -> None:
        self.values = values
        self.asked: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [str(i) for i, _ in enumerate(messages)]

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        ids = list(ids)
        self.asked.append(len(ids))
        return [answer(int(i), self.values) for i in ids]


@pytest.fixture(autouse=True)
def task() -> None:
    """Flower refuses to create messages in a process that it has not told who it is."""
    LoopbackGrid(cast(Any, None), [])


def test_large_arrays_lie_in_files_and_are_read_as_they_were_sent(tmp_path: Path) -> None:
    grid = SpoolingGrid(cast(Any, Answering()), tmp_path)
    (first, second) = grid.pull_messages(["4", "7"])
    record = first.content.array_records["update"]
    assert isinstance(record["large"], SpooledArray)
    assert not isinstance(record["small"], SpooledArray)
    assert record["large"].data == answer(4).content.array_records["update"]["large"].data
    tensors = from_arrays(record)
    assert bool((tensors["large"] == 4).all())
    assert tensors["large"].shape == (LARGE,)
    assert tensors["small"].tolist() == [0, 1, 2]
    tensors["large"][0] = 9.0  # a copy of this process's own
    assert bool((from_arrays(second.content.array_records["update"])["large"] == 7).all())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("large", [True, False])
def test_answers_of_a_large_model_are_taken_some_at_a_time(tmp_path: Path, large: bool) -> None:
    inner = Answering(LARGE if large else 10)
    grid = SpoolingGrid(cast(Any, inner), tmp_path)
    ids = list(grid.push_messages([answer(i, inner.values) for i in range(AT_ONCE + 3)]))
    assert len(list(grid.pull_messages(ids))) == AT_ONCE + 3
    assert inner.asked == ([AT_ONCE, 3] if large else [AT_ONCE + 3])


@pytest.mark.parametrize(("bytes_at_once", "asked"), [(1, 1), (2 * 4 * LARGE + 1000, 2)])
def test_fewer_answers_are_taken_at_a_time_the_larger_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, asked: int
) -> None:
    monkeypatch.setattr(spool, "BYTES_AT_ONCE", bytes_at_once)
    answering = Answering()
    grid = SpoolingGrid(cast(Any, answering), tmp_path)
    grid.push_messages([answer(0)])  # the model goes out before any answer comes
    assert len(list(grid.pull_messages([str(i) for i in range(6)]))) == 6
    assert answering.asked == [asked] * (6 // asked)


def test_a_damaged_array_on_disk_is_refused_by_name(tmp_path: Path) -> None:
    inner = Answering()
    grid = SpoolingGrid(cast(Any, inner), tmp_path)
    (message,) = grid.pull_messages(["1"])
    record = message.content.array_records["update"]
    spooled = cast(Any, record["large"])
    spooled.content = spooled.content[:-4]
    with pytest.raises(Exception, match="array 'large' cannot be decoded: float32"):
        from_arrays(record)


def test_answers_stay_in_memory_where_they_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    grid = SpoolingGrid(cast(Any, Answering()), tmp_path / "gone")
    (message,) = grid.pull_messages(["4"])
    record = message.content.array_records["update"]
    assert not isinstance(record["large"], SpooledArray)
    assert bool((from_arrays(record)["large"] == 4).all())
    assert "stays in memory" in caplog.text


def anonymous() -> int:
    """Return this process's memory that no file backs, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    pytest.skip("no RssAnon in /proc/self/status")


def test_a_rounds_answers_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """Sixty answers of eight MiB, held and read, cost less than half of them in memory would."""
    grid = SpoolingGrid(cast(Any, Answering(8 * SMALLEST // 4)), tmp_path)
    list(grid.push_messages([answer(0)]))
    before = anonymous()
    answers = list(grid.pull_messages([str(i) for i in range(60)]))
    tensors = [from_arrays(m.content.array_records["update"])["large"] for m in answers]
    total = torch.zeros(())
    for tensor in tensors:
        total = total + tensor.sum()
    assert float(total) == float(sum(range(60)) * (8 * SMALLEST // 4))
    # Half: other tests left holes in this process's memory, which the allocator may or may not use.
    assert anonymous() - before < 30 * 8 * SMALLEST
