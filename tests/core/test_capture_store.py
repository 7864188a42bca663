"""A store holds what fits: what was sent once a round, less precision, a quota, the last rounds."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from refusals import check_named, refused
from safetensors.torch import load_file, save_file

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.audit.uncaptured import read_removed
from bract.captures.storing import RoundLostError
from bract.errors import BractError
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration, ObservationFile
from bract.schema.capture import OBSERVATION_SCHEMA, Rounding
from bract.updates.rounding import rounded, widened


def seen(number: int = 1, client: str = "client-0", **changes: Any) -> Observation:
    generator = torch.Generator().manual_seed(number)
    sent = {"w": torch.randn(50, 20, generator=generator), "b": torch.randn(20)}
    fields: dict[str, Any] = {
        "round": number,
        "client": client,
        "parameters": sent | {"b": torch.zeros(20)},
        "buffers": {"bn.running_mean": torch.ones(3)},
        "update": {n: 0.01 * torch.randn(v.shape) for n, v in sent.items()},
        "returned_buffers": {"bn.running_mean": torch.full((3,), 0.1)},
        "declaration": ClientDeclaration(model="lenet"),
    }
    return Observation(**(fields | changes))


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def same(one: Observation, other: Observation) -> bool:
    return all(
        getattr(one, group).keys() == getattr(other, group).keys()
        and all(torch.equal(v, getattr(other, group)[n]) for n, v in getattr(one, group).items())
        for group in ("parameters", "buffers", "update", "returned_buffers", "ciphertexts")
    )


# What was sent is stored once a round.


def test_what_was_sent_lies_once_a_round_and_every_capture_reads_it(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    saved = [seen(n, f"client-{c}") for n in (1, 2) for c in range(4)]
    folders = [store.save(observation) for observation in saved]
    for number in (1, 2):
        assert len(list((tmp_path / f"round-{number:04d}" / ".sent").iterdir())) == 2
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert names == {"observation.json", "update.safetensors", "returned_buffers.safetensors"}
    assert all(same(a, b) for a, b in zip(saved, store, strict=True))
    assert [capture.key for capture in Captures(tmp_path).index] == [s.key for s in saved]


def test_clients_that_were_sent_something_else_keep_it_apart(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    first, second = seen(client="a"), seen(client="b", parameters={"w": torch.ones(2)})
    store.save(first)
    store.save(second)
    assert [same(a, b) for a, b in zip((first, second), store, strict=True)] == [True, True]


def test_a_capture_of_the_schema_before_is_read(tmp_path: Path) -> None:
    observation = seen()
    path = ObservationStore(tmp_path).save(observation) / "observation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema": 6}))
    (read,) = ObservationStore(tmp_path)
    assert same(read, observation)


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "observation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "a" * 63, "A" * 64, "", "a" * 65, "../" + "a" * 61, None, 7]
)
def test_a_reference_that_is_no_digest_is_refused(tmp_path: Path, name: Any) -> None:
    folder = ObservationStore(tmp_path).save(seen())
    changed(folder, sent={"parameters": name})
    with refused("capture-damaged", "sent.parameters"):
        ObservationStore(tmp_path).load(folder)


def test_a_reference_for_what_is_never_shared_is_refused(tmp_path: Path) -> None:
    folder = ObservationStore(tmp_path).save(seen())
    changed(folder, sent={"update": "a" * 64})
    with refused("capture-damaged", "sent.update"):
        ObservationStore(tmp_path).describe(folder)


def test_what_was_sent_is_held_against_its_hash_by_every_reader(
    tmp_path: Path,
) -> None:
    store = ObservationStore(tmp_path)
    folder = store.save(seen())
    store.load(folder)
    digest = json.loads((folder / "observation.json").read_text())["sent"]["parameters"]
    path = tmp_path / "round-0001" / ".sent" / f"{digest}.safetensors"
    other = load_file(path)
    path.unlink()
    save_file({name: value + 1 for name, value in other.items()}, path)
    with refused("capture-damaged", "client-0", "SHA-256"):
        ObservationStore(tmp_path).load(folder)
    path.unlink()
    with refused("capture-damaged", tmp_path):
        ObservationStore(tmp_path).load(folder)
    assert list(store) == []


@pytest.mark.parametrize("what", ["file", "folder", "directory"])
def test_what_was_sent_is_no_link_out_of_the_store(tmp_path: Path, what: str) -> None:
    """The content is the one referred to, so that nothing but the link is wrong."""
    store = ObservationStore(tmp_path / "captures")
    folder = store.save(seen())
    sent = folder.parent / ".sent"
    outside = tmp_path / "outside"
    shutil.copytree(sent, outside)
    digest = json.loads((folder / "observation.json").read_text())["sent"]["parameters"]
    path = sent / f"{digest}.safetensors"
    if what == "folder":
        shutil.rmtree(sent)
        sent.symlink_to(outside)
    else:
        path.unlink()
        if what == "file":
            path.symlink_to(outside / path.name)
        else:
            path.mkdir()
    with refused("capture-damaged", tmp_path):
        store.load(folder)


def test_shared_tensors_that_lack_a_name_are_refused(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    folder = store.save(seen())
    content = json.loads((folder / "observation.json").read_text())
    changed(folder, tensors=content["tensors"] | {"parameters": ["w", "elsewhere"]})
    with refused("capture-damaged", tmp_path):
        store.load(folder)


# Precision.


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float16", 1e-6, 6e-4), ("bfloat16", 5e-4, 4e-3)]
)
def test_a_rounded_update_takes_half_and_is_read_as_float32(
    tmp_path: Path, dtype: Any, least: float, most: float
) -> None:
    observation = seen()
    update, loss = rounded(observation.update, dtype)
    store = ObservationStore(tmp_path)
    folder = store.save(replace(observation, update=update, rounded=loss))
    read = store.load(folder)
    assert loss is not None and read.rounded == loss == store.describe(folder).rounded
    assert loss.saved == sum(2 * v.numel() for v in update.values()) and loss.kept == ()
    assert {v.dtype for v in read.update.values()} == {torch.float32}
    stored = load_file(folder / "update.safetensors")
    assert {str(v.dtype) for v in stored.values()} == {f"torch.{dtype}"}
    came = torch.cat([v.flatten() for v in observation.update.values()]).double()
    found = torch.cat([v.flatten() for v in read.update.values()]).double()
    assert float((found - came).norm() / came.norm()) == pytest.approx(loss.error, rel=1e-6)
    assert loss.error is not None and least < loss.error < most
    assert Captures(tmp_path).index[0].rounded == loss
    read.check()


def test_a_tensor_that_rounding_would_spoil_stays_as_it_came() -> None:
    update = {
        "fine": torch.randn(100),
        "overflows": torch.tensor([1.0, 7e4]),
        "vanishes": torch.full((10,), 1e-9),
        "not a number": torch.tensor([1.0, torch.nan]),
        "infinite": torch.tensor([1.0, torch.inf]),
        "wide": torch.randn(4, dtype=torch.float64),
        "count": torch.tensor([3]),
        "empty": torch.zeros(0),
        "zero": torch.zeros(5),
    }
    found, loss = rounded(update, "float16")
    assert loss is not None
    low = {name for name, value in found.items() if value.dtype == torch.float16}
    assert low == {"fine", "empty", "zero"}
    assert set(loss.kept) == set(update) - low
    assert loss.saved == 2 * 105
    for name in loss.kept:
        torch.testing.assert_close(found[name], update[name], rtol=0, atol=0, equal_nan=True)
    assert {n: v.dtype for n, v in widened(found, loss).items()} == {
        n: v.dtype for n, v in update.items()
    }
    assert rounded(update, "bfloat16")[1].kept.count("overflows") == 0  # type: ignore[union-attr]


def test_a_client_that_trained_in_float16_is_not_widened() -> None:
    update = {"a": torch.randn(3).half(), "b": torch.randn(3)}
    found, loss = rounded(update, "float16")
    assert {n: v.dtype for n, v in widened(found, loss).items()} == {
        "a": torch.float16,
        "b": torch.float32,
    }


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_where_nothing_is_rounded_nothing_is_said(dtype: Any) -> None:
    update = {"w": torch.tensor([1e9]) if dtype == "float16" else torch.randn(3)}
    found, loss = rounded(update, dtype)
    assert loss is None and torch.equal(found["w"], update["w"])


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "int8"},
        {"error": -1.0},
        {"error": float("nan")},
        {"saved": -1},
        {"saved": 10**30},
        {"kept": ["x" * 501]},
        {"more": 1},
    ],
)
def test_what_a_capture_says_of_its_rounding_is_bounded(tmp_path: Path, fields: Any) -> None:
    folder = ObservationStore(tmp_path).save(seen())
    good = Rounding(dtype="float16", error=0.1, saved=4).model_dump(mode="json")
    changed(folder, rounded=good)
    assert ObservationStore(tmp_path).load(folder).rounded is not None
    changed(folder, rounded=good | fields)
    with refused("capture-damaged", "client-0"):
        ObservationStore(tmp_path).load(folder)


# Compression.


def zipped(root: Path) -> ObservationStore:
    store = ObservationStore(root)
    store.compression = "zstd"
    return store


def sparse(**changes: Any) -> Observation:
    """An update of which nine tenths are zero, as from a client that prunes."""
    update = {"w": torch.randn(50, 20) * (torch.rand(50, 20) > 0.9), "b": torch.zeros(20)}
    return seen(update=update, **changes)


def test_an_update_that_zstd_makes_smaller_is_read_as_it_was(tmp_path: Path) -> None:
    observation = sparse()
    folder = zipped(tmp_path / "packed").save(observation)
    plain = ObservationStore(tmp_path / "plain").save(observation)
    assert not (folder / "update.safetensors").exists()
    held = (plain / "update.safetensors").stat().st_size
    assert (folder / "update.safetensors.zst").stat().st_size < 0.4 * held
    description = ObservationStore(tmp_path / "packed").describe(folder)
    assert description.packed == held
    (read,) = ObservationStore(tmp_path / "packed")
    assert same(read, observation)
    assert (
        pyarrow.decompress(
            (folder / "update.safetensors.zst").read_bytes(), held, "zstd", asbytes=True
        )
        == (plain / "update.safetensors").read_bytes()
    )


def test_a_rounded_update_is_compressed_too_and_its_size_as_it_came_is_known(
    tmp_path: Path,
) -> None:
    observation = sparse()
    update, loss = rounded(observation.update, "bfloat16")
    folder = zipped(tmp_path).save(replace(observation, update=update, rounded=loss))
    (read,) = ObservationStore(tmp_path)
    assert read.rounded == loss and read.update["w"].dtype == torch.float32
    assert ObservationStore(tmp_path).describe(folder).uploaded == 4 * (1020 + 3)
    assert Captures(tmp_path).index[0].uploaded == 4 * (1020 + 3)


def test_what_zstd_does_not_make_smaller_stays_as_it_is(tmp_path: Path) -> None:
    noise = torch.randint(-(2**31), 2**31 - 1, (1020,), dtype=torch.int32).view(torch.float32)
    folder = zipped(tmp_path).save(seen(update={"w": noise}))
    assert (folder / "update.safetensors").is_file()
    assert ObservationStore(tmp_path).describe(folder).packed is None


def bomb(folder: Path, size: int) -> None:
    """Put an update in place that is small and unpacks to ``size`` zeros."""
    content = pyarrow.compress(bytes(size), "zstd", asbytes=True)
    (folder / "update.safetensors.zst").write_bytes(content)


@pytest.mark.parametrize("size", [2**20 + 20_000, 2**30])
def test_an_update_that_says_it_is_too_large_is_not_unpacked(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent has about 4 kB: twice that and 1 MiB is the limit."""
    folder = zipped(tmp_path).save(sparse())
    bomb(folder, size)
    changed(folder, packed=size)
    monkeypatch.setattr("pyarrow.Codec", None)
    with refused("message-malformed", "1.1", "MB"):
        ObservationStore(tmp_path).load(folder)


@pytest.mark.parametrize("declared", [8, 2**19, 2**20 + 100])
def test_an_update_that_is_not_as_large_as_it_says_is_refused(
    tmp_path: Path, declared: int
) -> None:
    folder = zipped(tmp_path).save(sparse())
    bomb(folder, 2**24)
    changed(folder, packed=declared)
    with pytest.raises(BractError, match=r"client-0: .*cannot be unpacked|corrupted"):
        ObservationStore(tmp_path).load(folder)


def test_a_packed_file_beyond_the_limit_is_not_even_read(tmp_path: Path) -> None:
    folder = zipped(tmp_path).save(sparse())
    with (folder / "update.safetensors.zst").open("r+b") as file:
        file.truncate(2**40)
    with refused("capture-damaged", tmp_path):
        ObservationStore(tmp_path).load(folder)


@pytest.mark.parametrize("size", [-1, 0, 7, 10**13, "1", 2.5, True])
def test_what_a_capture_says_of_its_compression_is_bounded(tmp_path: Path, size: Any) -> None:
    folder = zipped(tmp_path).save(sparse())
    changed(folder, packed=size)
    with refused("capture-damaged", tmp_path):
        ObservationStore(tmp_path).load(folder)


def test_an_update_that_is_cut_short_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zipped(tmp_path).save(sparse())
    path = folder / "update.safetensors.zst"
    path.write_bytes(path.read_bytes()[:-5])
    assert list(ObservationStore(tmp_path)) == [] and str(folder) in caplog.text
    path.unlink()
    assert list(ObservationStore(tmp_path)) == []


# The quota.


def test_nothing_goes_beyond_the_quota_by_a_byte(tmp_path: Path) -> None:
    free = ObservationStore(tmp_path / "free")
    for client in range(3):
        free.save(seen(client=f"client-{client}"))
    three = size(tmp_path / "free")
    store = ObservationStore(tmp_path / "held", quota=three)
    for client in range(3):
        store.save(seen(client=f"client-{client}"))
    assert size(tmp_path / "held") == three
    with refused("file-unwritable", "capture.quota", kind=RoundLostError):
        store.save(seen(client="client-3"))
    assert size(tmp_path / "held") == three
    tight = ObservationStore(tmp_path / "tight", quota=three - 1)
    tight.save(seen(client="client-0"))
    tight.save(seen(client="client-1"))
    with pytest.raises(RoundLostError):
        tight.save(seen(client="client-2"))


def test_the_quota_counts_what_was_there_before_and_what_somebody_removed(tmp_path: Path) -> None:
    first = ObservationStore(tmp_path).save(seen(1))
    store = ObservationStore(tmp_path, quota=int(1.5 * size(tmp_path)))
    with pytest.raises(RoundLostError):
        store.save(seen(2))
    shutil.rmtree(first.parent)
    assert store.save(seen(2)).is_dir()


def test_a_capture_that_replaces_another_needs_no_room_of_its_own(tmp_path: Path) -> None:
    ObservationStore(tmp_path).save(seen())
    store = ObservationStore(tmp_path, quota=size(tmp_path) + 200)
    for _ in range(3):
        store.save(seen())


# Retention.


def rounds(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("round-*"))


def test_earlier_rounds_go_whole_and_are_listed(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path, quota=10**9)
    for number in (1, 2, 5, 6):
        store.save(seen(number, "a"))
        store.save(seen(number, "b"))
    before = size(tmp_path / "round-0001")
    gone = store.retire(keep=2, before=6)
    assert [(g.round, g.captures, g.size) for g in gone] == [(1, 2, before)]
    assert rounds(tmp_path) == ["round-0002", "round-0005", "round-0006"]
    assert [(g.round, g.captures) for g in read_removed(tmp_path)] == [(1, 2)]
    assert [o.key for o in store] == [f"round-000{n}/{c}" for n in (2, 5, 6) for c in "ab"]
    assert store.retire(keep=2, before=6) == []
    assert [g.round for g in store.retire(keep=0, before=6)] == [2, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".reading.lock", "removed.jsonl", "round-0006",
    ]  # fmt: skip


def test_no_round_goes_while_an_audit_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObservationStore(tmp_path)
    for number in (1, 2, 3):
        store.save(seen(number))
    with RunDirectory(tmp_path).reading(), ObservationStore(tmp_path).reading():
        assert store.retire(keep=1, before=4) == []
        check_named(caplog.text, 2, "capture.keep_rounds")
        assert len(rounds(tmp_path)) == 3
    assert [g.round for g in store.retire(keep=1, before=4)] == [1, 2]


def test_a_round_that_was_being_removed_when_a_process_died_goes_with_the_next(
    tmp_path: Path,
) -> None:
    store = ObservationStore(tmp_path)
    store.save(seen(2))
    (tmp_path / "round-0002").rename(tmp_path / ".round-0002.abc.tmp")
    store.save(seen(3))
    assert [o.round for o in store] == [3]
    store.retire(keep=1, before=4)
    assert not list(tmp_path.glob(".round-*"))


def test_only_rounds_are_removed(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path)
    store.save(seen(1))
    for name in ("round-1", "round-0002x", "round-٠٠٠٢", "notes"):
        (tmp_path / name).mkdir()
    assert [g.round for g in store.retire(keep=0, before=9)] == [1]
    assert {"round-1", "round-0002x", "notes"} < {p.name for p in tmp_path.iterdir()}


def test_a_store_that_is_read_only_is_read(tmp_path: Path) -> None:
    store = ObservationStore(tmp_path / "captures")
    store.save(seen())
    (tmp_path / "captures").chmod(0o500)
    try:
        with store.reading():
            assert len(list(store)) == 1
    finally:
        (tmp_path / "captures").chmod(0o700)
    with ObservationStore(tmp_path / "nowhere").reading():
        assert not (tmp_path / "nowhere").exists()


def test_a_header_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    """Nothing in a capture is compressed: a file cannot say that it holds more than its bytes."""
    store = ObservationStore(tmp_path)
    folder = store.save(seen())
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ).encode()
    (folder / "update.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with refused("capture-damaged", tmp_path):
        store.load(folder)


def test_the_description_of_a_capture_is_what_its_schema_says(tmp_path: Path) -> None:
    folder = ObservationStore(tmp_path).save(seen())
    text = (folder / "observation.json").read_text()
    found = ObservationFile.model_validate_json(text)
    assert found.version == OBSERVATION_SCHEMA and set(found.sent) == {"parameters", "buffers"}
    assert os.listdir(folder.parent / ".sent")  # noqa: PTH208 - hidden names count


def test_a_capture_lists_what_was_declared_and_nothing_else(tmp_path: Path) -> None:
    """An app of scikit-learn has no activation and no optimizer, so its capture names none."""
    store = ObservationStore(tmp_path)
    declared = ClientDeclaration(num_examples=4, momentum=0.9)
    tensors = {"coef": torch.zeros(2)}
    folder = store.save(
        Observation(round=1, client="a", parameters=tensors, update=tensors, declaration=declared)
    )
    written = json.loads((folder / "observation.json").read_text())["declaration"]
    assert written == {"num_examples": 4, "momentum": 0.9}
    assert store.load(folder).declaration == declared
