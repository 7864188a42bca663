"""A store in memory keeps large parts in files, and hands out what it was given."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import ObjectStoreFactory
from ruling import held

from bract.runtime import parts_on_disk
from bract.runtime.parts_on_disk import SMALLEST, Part


def made(folder: Path) -> Any:
    store: Any = ObjectStoreFactory(":flwr-in-memory:").store()
    store.verify = False
    layers = parts_on_disk.layers(folder)
    ruled = {place: layer(held(place)) for place, layer in layers.items()}
    ours = {place.rpartition(".")[2]: method for place, method in ruled.items()}
    store.__class__ = type("Ruled", (type(store),), ours)
    return store


def put(store: Any, content: bytes) -> str:
    name = hashlib.sha256(content).hexdigest()
    store.preregister(1, ObjectTree(object_id=name))
    store.put(name, content)
    return name


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_large_part_is_in_a_file_without_a_name_until_it_is_deleted(tmp_path: Path) -> None:
    store = made(tmp_path)
    before = open_files()
    contents = [os.urandom(SMALLEST), os.urandom(5 * SMALLEST + 3)]
    names = [put(store, content) for content in contents]
    store.put(names[0], contents[0])  # a second time, as after an answer that was lost
    assert all(isinstance(store.store[name].content, Part) for name in names)
    assert open_files() == before + 2 and list(tmp_path.iterdir()) == []
    assert [store.get(name) for name in names] == contents
    assert [store.get(name) for name in names] == contents
    for name in names:
        store.delete(name)
    assert open_files() == before and store.get(names[0]) is None


def test_a_small_part_and_one_that_has_not_come_are_as_in_flower_s_store(tmp_path: Path) -> None:
    store = made(tmp_path)
    name = put(store, b"small")
    assert store.store[name].content == b"small" and store.get(name) == b"small"
    late = hashlib.sha256(b"late").hexdigest()
    store.preregister(1, ObjectTree(object_id=late))
    assert store.get(late) == b""


def test_where_nothing_can_be_written_a_part_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = made(tmp_path / "gone")
    content = os.urandom(SMALLEST)
    assert store.get(put(store, content)) == content
    assert "a part stays in memory" in caplog.text
