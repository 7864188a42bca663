import stat
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from refusals import refused

from bract.client.defenses import DefenseError, DefenseState

TENSORS = {
    "adadefense.m": torch.tensor([1.5, -2.0]),
    "adadefense.round": torch.tensor(3),
    "fedkl.key": torch.rand(5),
}


def same(found: Any) -> None:
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in TENSORS.items())


def test_without_a_folder_the_state_lives_in_flowers_context() -> None:
    record = RecordDict()
    assert DefenseState(record, directory=None, key="a").load() == {}
    DefenseState(record, directory=None, key="a").save(TENSORS)
    same(DefenseState(record, directory=None, key="a").load())
    DefenseState(record, directory=None, key="a").save({})
    assert DefenseState(record, directory=None, key="a").load() == {}


def test_with_a_folder_it_survives_the_process_and_stays_out_of_the_context(tmp_path: Path) -> None:
    record = RecordDict()
    store = DefenseState(record, directory=tmp_path / "state", key="demo-client/0")
    store.save(TENSORS)
    assert not record
    again = DefenseState(RecordDict(), directory=tmp_path / "state", key="demo-client/0")
    assert sorted(again.load()) == sorted(TENSORS)
    assert torch.equal(again.load()["fedkl.key"], TENSORS["fedkl.key"])
    assert again.path is not None
    assert again.path.name == "demo-client_0.safetensors"
    assert DefenseState(record, directory=tmp_path / "state", key="other").load() == {}


def test_only_the_operator_may_read_it_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    store = DefenseState(RecordDict(), directory=tmp_path / "state", key="a")
    for _ in range(2):
        store.save(TENSORS)
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["a.safetensors"]
    assert store.path is not None
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    store.path.chmod(0o644)
    with refused("file-exposed", 600, kind=DefenseError):
        store.load()


def test_a_broken_file_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    store = DefenseState(RecordDict(), directory=tmp_path, key="a")
    store.save(TENSORS)
    assert store.path is not None
    store.path.write_bytes(store.path.read_bytes()[:40])
    with refused("file-damaged", tmp_path, kind=DefenseError):
        store.load()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file-unwritable", tmp_path, kind=DefenseError):
        DefenseState(RecordDict(), directory=tmp_path / "file", key="a").save(TENSORS)
