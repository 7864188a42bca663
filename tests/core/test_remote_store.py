"""Captures at URLs of fsspec's: its memory and its local file system."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from modes import open_to_others
from refusals import refused

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.audit.uncaptured import read_missed, read_removed
from bract.captures.remote import RemoteStore, local_folder
from bract.captures.storing import RoundLostError
from bract.config import build_config
from bract.errors import BractError
from bract.schema import ClientDeclaration
from bract.schema.capture import MISSED, MissedCapture

COUNT = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/there"
        return
    name = f"bract-test-{next(COUNT)}"
    yield f"memory://{name}/captures"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


def seen(number: int = 1, client: str = "a", value: float = 1.0) -> Observation:
    return Observation(
        round=number,
        client=client,
        parameters={"w": torch.full((300,), float(number))},
        buffers={"n": torch.tensor(3)},
        update={"w": torch.full((300,), value)},
        declaration=ClientDeclaration(model="lenet"),
        provenance={"received": value},
    )


def names(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path[len(root.rstrip("/")) + 1 :] for path in files.find(root))


def put(url: str, name: str, content: bytes) -> None:
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
    files.pipe_file(f"{root}/{name}", content)


def test_what_is_put_is_fetched_and_read_as_from_a_folder(url: str, tmp_path: Path) -> None:
    store = RemoteStore(url)
    assert RemoteStore(url).is_empty
    local = ObservationStore(tmp_path / "local")
    for number, client in ((1, "a"), (1, "b"), (2, "a")):
        store.save(seen(number, client))
        local.save(seen(number, client))
    assert not store.is_empty
    out = tmp_path / "out"
    assert store.fetch(out) == ["round-0001/a", "round-0001/b", "round-0002/a"]
    wanted = sorted(p.relative_to(local.root) for p in local.root.rglob("*") if p.is_file())
    assert sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file()) == wanted
    for path in wanted:
        assert (out / path).read_bytes() == (local.root / path).read_bytes()
    assert [o.key for o in ObservationStore(out)] == [o.key for o in local]
    assert len(Captures(out).index) == 3
    assert store.fetch(out) == []
    store.save(seen(2, "a", value=5.0))
    assert store.fetch(out) == ["round-0002/a"]
    (found,) = [o for o in ObservationStore(out) if o.round == 2]
    assert found.update["w"].unique().tolist() == [5.0]
    store.compression = "zstd"
    store.save(seen(3, "a", value=7.0))
    assert store.fetch(out) == ["round-0003/a"]
    assert (out / "round-0003/a/update.safetensors.zst").is_file()
    (found,) = [o for o in ObservationStore(out) if o.round == 3]
    assert found.update["w"].unique().tolist() == [7.0]


def test_the_description_comes_last_and_goes_first(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(url)
    files = type(store._files)
    order: list[str] = []
    put_file, remove = RemoteStore._put, files.rm_file

    def piped(self: Any, name: str, content: bytes) -> None:
        order.append(f"put {name.rpartition('/')[2]}")
        put_file(self, name, content)

    def removed(self: Any, path: str) -> Any:
        order.append(f"rm {path.rpartition('/')[2]}")
        return remove(self, path)

    monkeypatch.setattr(RemoteStore, "_put", piped)
    monkeypatch.setattr(files, "rm_file", removed)
    store.save(seen())
    assert order[-2:] == ["put update.safetensors", "put observation.json"] and len(order) == 4
    order.clear()
    store.save(seen(value=2.0))
    assert order == ["rm observation.json", "put update.safetensors", "put observation.json"]


def test_a_capture_that_is_half_there_is_not_fetched(url: str, tmp_path: Path) -> None:
    store = RemoteStore(url)
    store.save(seen(1, "a"))
    put(url, "round-0001/b/update.safetensors", b"half")
    assert store.fetch(tmp_path / "out") == ["round-0001/a"]
    assert not (tmp_path / "out" / "round-0001" / "b").exists()


def test_nothing_but_captures_is_fetched(url: str, tmp_path: Path) -> None:
    store = RemoteStore(url)
    store.save(seen(1, "a"))
    for name in (
        "round-0001/a/model.py",
        "round-0001/.evil/observation.json",
        "round-0001/a/deep/observation.json",
        "round-0001/.sent/notes.safetensors",
        "round-1/a/observation.json",
        "other/a/observation.json",
        "observation.json",
        "round-0001/a b/observation.json",
    ):
        put(url, name, b"{}")
    assert store.fetch(tmp_path / "out") == ["round-0001/a"]
    found = [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(found) == 4 and "model.py" not in found
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "there") == ["out"]


def test_an_empty_place_is_said(url: str, tmp_path: Path) -> None:
    with refused("captures-none"):
        RemoteStore(url).fetch(tmp_path / "out")


def test_lists_are_appended_to_over_restarts_and_fetched(url: str, tmp_path: Path) -> None:
    line = MissedCapture(round=1, node_id="7", reason="full").model_dump_json(by_alias=True)
    for _ in range(2):
        store = RemoteStore(url)
        store.note(MISSED, line)
        store.note(MISSED, line)
    store.save(seen())
    store.fetch(tmp_path / "out")
    assert [m.node_id for m in read_missed(tmp_path / "out")] == ["7"] * 4


def test_the_quota_and_the_last_rounds_hold_there_too(url: str, tmp_path: Path) -> None:
    free = RemoteStore(f"{url}-free")
    for number in (1, 2):
        free.save(seen(number))
    files, root = fsspec.core.url_to_fs(f"{url}-free")
    held = sum(files.info(f"{root}/{name}")["size"] for name in names(f"{url}-free"))
    store = RemoteStore(url, quota=held)
    store.save(seen(1))
    store.save(seen(2))
    store.save(seen(2, value=3.0))  # in the place of the one before
    with refused("file-unwritable", "capture.quota", kind=RoundLostError):
        store.save(seen(3))
    assert [(g.round, g.captures, g.size) for g in store.retire(keep=1, before=3)] == [
        (1, 1, held // 2)
    ]
    store.save(seen(3))
    assert {name.partition("/")[0] for name in names(url)} == {
        "round-0002", "round-0003", "removed.jsonl",
    }  # fmt: skip
    store.fetch(tmp_path / "out")
    assert [g.round for g in read_removed(tmp_path / "out")] == [1]


def test_whatever_a_place_raises_is_one_line_that_loses_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = RemoteStore("memory://bract-fails")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("403 Forbidden\nrequest 7")

    monkeypatch.setattr(type(store._files), "pipe_file", fail)
    with refused("file-unreadable", "RuntimeError", 403, 7, kind=RoundLostError) as caught:
        store.save(seen())
    assert "\n" not in str(caught.value) and store.place in str(caught.value)
    with refused("file-unreadable", 403):
        store.note(MISSED, "{}")


def test_an_unsafe_name_is_refused_before_anything_is_put(url: str) -> None:
    with refused("message-malformed", "../b"):
        RemoteStore(url).save(seen(client="../b"))
    assert names(url) == []


@pytest.mark.parametrize("bad", ["nothing-like-it://x/y", "s3:///"])
def test_a_place_that_cannot_be_used_is_said_at_once(bad: str) -> None:
    with refused("file-unreadable"):
        RemoteStore(bad)


def test_no_password_is_shown() -> None:
    store = RemoteStore("memory://bract-secret")
    store.url = "ftp://someone:secret@host/x?token=abc"
    assert store.place == "ftp://host/x"


@pytest.mark.parametrize(
    ("where", "folder"),
    [
        ("captures", Path("captures")),
        ("/srv/a b", Path("/srv/a b")),
        (Path("x"), Path("x")),
        ("file:///srv/captures", Path("/srv/captures")),
        ("s3://bucket/x", None),
        ("memory://x", None),
        ("simplecache::s3://bucket/x", None),
    ],
)
def test_a_url_is_told_from_a_folder(where: Any, folder: Any) -> None:
    assert local_folder(where) == folder


def template_that_runs_code(folder: Path) -> Path:
    """A file of references as fsspec's ``reference::`` renders them, with Jinja."""
    run = f"cycler.__init__.__globals__.os.mkdir('{folder}/ran')"
    gen = {"key": f"{{{{ {run} }}}}{{{{i}}}}", "url": "x", "dimensions": {"i": [0]}}
    path = folder / "references.json"
    path.write_text(json.dumps({"version": 1, "templates": {}, "gen": [gen], "refs": {}}))
    return path


@pytest.mark.parametrize(
    "url", ["reference::file://{}", "memory://x::reference::file://{}", "reference://{}"]
)
def test_a_url_that_runs_code_is_no_store(url: str, tmp_path: Path) -> None:
    place = url.format(template_that_runs_code(tmp_path))
    with refused("file-unreadable", "URL"):
        RemoteStore(place)
    with refused("config-value", "capture.store"):
        build_config({"capture": {"store": place}})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["git", "github", "dask", "zip", "simplecache", "jupyter", "x-y"])
def test_a_kind_of_url_that_holds_no_captures_is_refused(kind: str) -> None:
    with refused("file-unreadable", "URL"):
        RemoteStore(f"{kind}://bucket/x")


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("ftp://someone:p@ss@host/x", "ss@"),
        ("https://token@host/x", "token"),
        ("https://host/x?signature=abc", "abc"),
        ("https://host/x#abc", "abc"),
    ],
)
def test_what_a_place_says_of_a_failure_shows_no_credentials(
    url: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore("memory://bract-secret")
    store.url = url

    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(f"404, message='Not Found', url=URL('{url}')")

    monkeypatch.setattr(type(store._files), "find", fail)
    with refused("file-unreadable") as caught:
        store.fetch(Path("out"))
    assert secret not in str(caught.value) and "host/x" in str(caught.value)


def test_a_token_in_a_configuration_is_refused() -> None:
    for store in ("https://secret@host/x", "s3://key:secret@host/x", "s3://host/x?key=secret"):
        with refused("config-value") as caught:
            build_config({"capture": {"store": store}})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("grown", [2, -2])
def test_a_file_of_another_size_than_was_listed_is_not_taken(
    grown: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(f"memory://bract-size-{next(COUNT)}")
    store.save(seen())
    listed = RemoteStore._below

    def lied(self: RemoteStore, name: str) -> dict[str, int]:
        found = listed(self, name)
        return {n: s - grown if n.endswith("update.safetensors") else s for n, s in found.items()}

    monkeypatch.setattr(RemoteStore, "_below", lied)
    with pytest.raises(BractError, match="more" if grown > 0 else "fewer"):
        store.fetch(tmp_path / "out")
    assert not list((tmp_path / "out").rglob("update.*"))
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_what_is_put_into_a_local_place_and_fetched_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = RemoteStore(f"file://{tmp_path}/there/deep")
        store.save(seen())
        store.note(MISSED, "{}")
        store.fetch(tmp_path / "out")
    finally:
        os.umask(before)
    assert open_to_others(tmp_path) == []
