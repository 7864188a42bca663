"""Files appear whole or not at all."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save

from bract.disk import (
    lock,
    locked,
    replacing,
    tensor_files,
    tensors_on_disk,
    write_bytes,
    write_tensors,
    write_text,
)
from bract.rundir import RunDirectory


def mode_of(path: Any) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    opened = os.open

    def watched(path: Any, flags: Any, mode: Any = 0o777, **rest: Any) -> Any:
        descriptor = opened(path, flags, mode, **rest)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            seen.append(stat.S_IMODE(status.st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    path = write_text(tmp_path / "key", "secret", private=True)
    assert seen == [0o600]
    assert mode_of(path) == 0o600


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bytes(tmp_path / "state", b"earlier")

    def full(descriptor: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("write-failed", "state", 3):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"untouched")
    monkeypatch.setattr("uuid.UUID.hex", property(lambda self: "0" * 32))
    (tmp_path / f".state.{'0' * 32}.tmp").symlink_to(other)
    with refused("write-failed", tmp_path):
        write_bytes(tmp_path / "state", b"new")
    assert other.read_bytes() == b"untouched"


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(3)}
    found = load_file(write_tensors(tmp_path / "folder" / "x.safetensors", tensors))
    assert set(found) == {"a", "b"}
    assert torch.equal(found["b"], tensors["b"])
    assert torch.equal(found["a"], tensors["a"])


def test_large_tensors_on_disk_are_the_bytes_of_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"b": torch.arange(5), "a": torch.ones(2, 3).T, "c": torch.tensor(True)}
    expected = save({name: value.contiguous() for name, value in tensors.items()})
    assert tensors_on_disk(tensors, tmp_path) == expected
    monkeypatch.setattr(tensor_files, "LARGE", 1)
    content = tensors_on_disk(tensors, tmp_path / "new")
    assert not isinstance(content, bytes) and content[:] == expected
    assert list((tmp_path / "new").iterdir()) == []
    assert write_tensors(tmp_path / "x", tensors).read_bytes() == expected
    assert mode_of(tmp_path / "x") == 0o600


def test_a_folder_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with replacing(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["two"]


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("write-failed", "file/state"):
        write_bytes(tmp_path / "file" / "state", b"")


def test_a_clients_own_state_is_on_the_disk_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((folder, (tmp_path / "answered.json").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_text(tmp_path / "answered.json", "{}", private=True)
    assert synced == [(False, False), (True, True)]


@pytest.mark.parametrize("place", ["metrics.jsonl", "captures/round-0001/a/observation.json"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_run_of_another_party_that_holds_a_pipe_is_refused_and_not_waited_for(
    tmp_path: Path, place: str, linked: bool
) -> None:
    path = tmp_path / "run" / place
    path.parent.mkdir(parents=True)
    (tmp_path / "run" / "captures").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "pipe" if linked else path)
    if linked:
        path.symlink_to(tmp_path / "pipe")
    with refused("file-damaged", path, "named pipe"):
        RunDirectory.open(tmp_path / "run")


@pytest.mark.parametrize("held", ["locked", "lock"])
def test_a_lock_ends_with_its_block_whatever_was_forked_in_it(held: str, tmp_path: Path) -> None:
    """Workers of a data loader are forked, and may outlive the block."""
    path, ends = tmp_path / ".lock", os.pipe()
    hold = locked(path) if held == "locked" else lock(path, what="it", doing="test")
    with hold:
        child = os.fork()
        if not child:
            os.close(ends[1])
            os.read(ends[0], 1)
            os._exit(0)
    try:
        with lock(path, what="it", doing="test", patience=0.0):
            pass
    finally:
        os.close(ends[1])
        os.waitpid(child, 0)


def test_waiting_for_a_lock_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, waiting = tmp_path / ".lock", threading.Event()

    def wait() -> None:
        with locked(path, patience=0.05):
            waiting.set()

    with locked(path):
        second = threading.Thread(target=wait)
        second.start()
        assert not waiting.wait(0.5)
    second.join()
    (line,) = [message for message in caplog.messages if str(path) in message]
    with locked(path):
        pass
    assert len([m for m in caplog.messages if str(path) in m]) == 1, line
