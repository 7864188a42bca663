import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from refusals import refused
from ruling import put

from bract.runtime import joining as joining_module


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "flwr-clientapp", joining_module.RULE)


def parts_of(found: Any) -> dict[str, bytes]:
    """What a message's arrays are sent as, by id."""
    contents = {found.object_id: found.deflate()}
    for child in (found.children or {}).values():
        contents |= parts_of(child)
    return contents


def read(record: ArrayRecord) -> ArrayRecord:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    found = inflate_object_from_contents(record.object_id, parts_of(record))
    assert isinstance(found, ArrayRecord)
    return found


def record(megabytes: int) -> ArrayRecord:
    """Arrays of several parts, of which some are alike, and one of no values."""
    values = np.arange(megabytes << 18, dtype=np.float32)
    zeros = Array(np.zeros(3 << 20, dtype=np.float32))
    return ArrayRecord({"w": Array(values), "a": zeros, "b": zeros, "e": Array(np.zeros(0))})


@pytest.mark.usefixtures("joining")
def test_arrays_are_those_that_were_sent() -> None:
    sent = record(16)
    assert read(sent) == sent
    assert read(sent).object_id == sent.object_id


@pytest.mark.usefixtures("joining")
def test_a_part_that_is_lacking_is_refused_as_by_flower() -> None:
    array = Array(np.arange(3 << 20, dtype=np.float32))
    children = dict(list((array.children or {}).items())[1:])
    with pytest.raises(ValueError, match="Unexpected set of `children`"):
        Array.inflate(array.deflate(), children)


@pytest.mark.usefixtures("joining")
def test_an_array_that_repeats_a_part_beyond_the_free_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zeros = Array(np.zeros(6 << 20, dtype=np.float32))  # 25 MB in five parts, three alike
    assert len(zeros.children or {}) == 3
    assert joining_module.free_memory() > 1 << 20
    monkeypatch.setattr(joining_module, "free_memory", lambda: 20_000_000)
    with refused("out-of-memory", 25165952, 20000000):
        Array.inflate(zeros.deflate(), zeros.children)


@pytest.mark.usefixtures("joining")
def test_a_large_message_is_in_memory_once_and_its_largest_array_twice() -> None:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    drawn = np.random.default_rng(0).standard_normal((4, 4 << 20), dtype=np.float32)
    sent = ArrayRecord({f"w{i}": Array(values) for i, values in enumerate(drawn)})
    contents, name = parts_of(sent), sent.object_id
    size = sum(len(content) for content in contents.values())
    del sent, drawn
    tracemalloc.start()
    found = inflate_object_from_contents(name, contents)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Parts of one array and its bytes, beside what was joined: Flower's own takes the whole twice.
    assert most < 1.4 * size
    assert isinstance(found, ArrayRecord)


def test_a_container_s_files_in_memory_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"max": "1000000", "current": "990000", "stat": "anon 9\nactive_file 100000\n"}
    for name, text in written.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    with (tmp_path / "memory.stat").open("a") as stat:
        stat.write("inactive_file 200000\nshmem 7\n")
    monkeypatch.setattr(joining_module, "CGROUP", str(tmp_path))
    assert joining_module.free_memory() == 1000000 - 990000 + 300000
