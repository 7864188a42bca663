"""What the hook is told to capture: which replies, how exactly, how much, where."""

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from refusals import refused

from bract import ObservationStore
from bract.audit.captures import Captures
from bract.audit.uncaptured import read_missed, read_removed
from bract.captures.remote import RemoteStore
from bract.config import build_config
from bract.config.config import CaptureConfig
from bract.rundir import RunDirectory
from bract.server import HonestButCurious
from bract.server.capturing import CapturePlan
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

APP = ClientApp()


@APP.train()
def _train(message: Message, context: Context) -> Message:
    moved = ArrayRecord(
        {n: Array(a.numpy() - 1) for n, a in message.content.array_records["arrays"].items()}
    )
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)


@APP.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict({"m": MetricRecord({"num-examples": 1})}), reply_to=message)


def start(store: Any, *, rounds: int = 4, clients: int = 4, **options: Any) -> ArrayRecord:
    """Train with the hook; return the arrays at the end, which no option changes."""
    grid = LoopbackGrid(APP, [{} for _ in range(clients)])
    initial = ArrayRecord({"w": Array(torch.zeros(200).numpy())})
    own = ObservationStore(store) if isinstance(store, Path) else RemoteStore(store)
    strategy = HonestButCurious(FedAvg(), own, **options)
    arrays = strategy.start(grid, initial, num_rounds=rounds).arrays
    assert arrays["w"].numpy().tolist() == [-float(rounds)] * 200
    return arrays


def kept(folder: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for observation in ObservationStore(folder):
        found.setdefault(observation.round, []).append(observation.client)
    return found


EVERYONE = ["node-1", "node-2", "node-3", "node-4"]


def test_without_a_word_everything_is_captured_as_it_came(tmp_path: Path) -> None:
    start(tmp_path)
    assert kept(tmp_path) == dict.fromkeys((1, 2, 3, 4), EVERYONE)
    assert {o.rounded for o in ObservationStore(tmp_path)} == {None}
    assert read_missed(tmp_path) == []


def test_every_other_round(tmp_path: Path) -> None:
    start(tmp_path, rounds=5, capture={"every": 2})
    assert sorted(kept(tmp_path)) == [1, 3, 5]
    start(tmp_path / "both", rounds=5, capture={"every": 2, "rounds": [2, 3]})
    assert sorted(kept(tmp_path / "both")) == [3]


def test_the_named_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, capture={"clients": ["node-2", "node-9"]})
    assert kept(tmp_path) == {n: ["node-2"] for n in (1, 2, 3, 4)}
    said = [r.getMessage() for r in caplog.records if "capture.clients" in r.getMessage()]
    assert len(said) == 1 and "no node-9 has replied yet; replied have node-1," in said[0]


def test_a_drawn_share_depends_on_seed_round_and_client_alone(tmp_path: Path) -> None:
    half = {"fraction": 0.5}
    start(tmp_path / "a", rounds=6, capture=half, seed=1)
    start(tmp_path / "b", rounds=6, capture=half, seed=1)
    start(tmp_path / "c", rounds=6, capture=half, seed=2)
    start(tmp_path / "fewer", rounds=6, clients=2, capture=half, seed=1)
    found = kept(tmp_path / "a")
    assert found == kept(tmp_path / "b") != kept(tmp_path / "c")
    assert len({tuple(clients) for clients in found.values()}) > 1
    two = {n: [c for c in clients if c in EVERYONE[:2]] for n, clients in found.items()}
    assert {n: clients for n, clients in two.items() if clients} == kept(tmp_path / "fewer")


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9, 1.0])
def test_the_share_is_the_one_that_was_asked_for(fraction: float) -> None:
    plan = CapturePlan(CaptureConfig(fraction=fraction), seed=7)
    taken = [plan.takes(n, f"client-{c}") for n in range(1, 101) for c in range(50)]
    assert sum(taken) / len(taken) == pytest.approx(fraction, abs=0.02)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_precision_is_the_one_that_was_asked_for(tmp_path: Path, dtype: Any) -> None:
    start(tmp_path, rounds=1, capture={"dtype": dtype})
    for capture in Captures(tmp_path).index:
        assert capture.rounded is not None and capture.rounded.dtype == dtype
        observation = Captures(tmp_path).load(capture)
        assert observation.update["w"].dtype == torch.float32
        assert observation.update["w"].tolist() == [1.0] * 200


def test_updates_are_compressed_where_that_was_asked_for(tmp_path: Path) -> None:
    start(tmp_path, rounds=1, capture={"compression": "zstd"})
    names = {path.name for path in tmp_path.rglob("update*")}
    assert names == {"update.safetensors.zst"}
    assert [o.update["w"].tolist() for o in ObservationStore(tmp_path)] == [[1.0] * 200] * 4


def test_at_the_quota_training_goes_on_and_the_missing_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path / "free", rounds=1, clients=2)
    stored = (tmp_path / "free").glob("round-*/**/*")
    room = sum(p.stat().st_size for p in stored if p.is_file())
    start(tmp_path / "held", capture={"quota": room + 50})
    held = tmp_path / "held"
    assert kept(held) == {1: EVERYONE[:2]}
    assert sum(p.stat().st_size for p in held.glob("round-*/**/*") if p.is_file()) <= room + 50
    missed = read_missed(held)
    assert [(m.round, m.node_id) for m in missed] == [
        (1, "3"), (1, "4"), *((n, str(c)) for n in (2, 3, 4) for c in (1, 2, 3, 4)),
    ]  # fmt: skip
    assert all("capture.quota of" in m.reason and "is reached" in m.reason for m in missed)
    said = [r for r in caplog.records if "was not captured" in r.getMessage()]
    assert len(said) == 4  # one a round, not one a client


def test_the_last_rounds_stay_and_every_removal_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, rounds=5, capture={"keep_rounds": 2, "rounds": [1, 2, 3, 5]})
    assert kept(tmp_path) == {3: EVERYONE, 5: EVERYONE}
    assert [(g.round, g.captures) for g in read_removed(tmp_path)] == [(1, 4), (2, 4)]
    said = [r.getMessage() for r in caplog.records if "was removed" in r.getMessage()]
    assert len(said) == 2 and said[0].startswith("round 1 was removed (captures: 4, ")


def test_the_quota_need_hold_no_more_rounds_than_are_kept(tmp_path: Path) -> None:
    start(tmp_path / "free", rounds=1)
    stored = (tmp_path / "free").glob("round-*/**/*")
    room = sum(p.stat().st_size for p in stored if p.is_file())
    quota = 2 * room + 400  # a time of arrival has more or fewer digits
    start(tmp_path / "held", rounds=5, capture={"keep_rounds": 2, "quota": quota})
    assert kept(tmp_path / "held") == {4: EVERYONE, 5: EVERYONE}
    assert read_missed(tmp_path / "held") == []


def test_nothing_is_removed_for_a_round_of_which_nothing_is_captured(tmp_path: Path) -> None:
    start(tmp_path, rounds=4, capture={"keep_rounds": 1, "every": 3})
    assert sorted(kept(tmp_path)) == [4]
    start(tmp_path / "b", rounds=3, capture={"keep_rounds": 1, "every": 3})
    assert sorted(kept(tmp_path / "b")) == [1]


def test_rounds_stay_while_they_are_audited(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    with ObservationStore(tmp_path).reading():
        start(tmp_path, capture={"keep_rounds": 1})
        assert sorted(kept(tmp_path)) == [1, 2, 3, 4]
    start(tmp_path, rounds=5, capture={"keep_rounds": 1})
    assert sorted(kept(tmp_path)) == [5]


def test_nothing_is_captured_where_it_is_switched_off(tmp_path: Path) -> None:
    start(tmp_path, capture=CaptureConfig(enabled=False))
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = "memory://bract-hook/captures"
    try:
        with caplog.at_level(logging.INFO, logger="flwr"):
            start(url, rounds=3, capture={"keep_rounds": 2, "dtype": "float16"})
        RemoteStore(url).fetch(tmp_path)
        assert kept(tmp_path) == {2: EVERYONE, 3: EVERYONE}
    finally:
        fsspec.filesystem("memory").rm("/bract-hook", recursive=True)
    start(f"file://{tmp_path}/there", rounds=1)
    assert kept(tmp_path / "there") == {1: EVERYONE}


def test_a_url_that_fails_costs_captures_and_one_attempt_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def fail(self: Any, path: str, value: bytes, **_: Any) -> None:
        if not path.endswith(".jsonl"):
            tried.append(path)
        raise OSError("no route to host")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", fail)
    start("memory://bract-away/captures", rounds=3)
    assert len(tried) == 3
    said = [r.getMessage() for r in caplog.records if "was not captured" in r.getMessage()]
    assert len(said) == 3 and "no route to host" in said[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capture": {"evry": 2}}, ("config-value", "capture", "evry")),
        ({"capture": {"every": 0}}, ("config-value", "capture", "every", "0")),
        ({"capture": {"fraction": 0}}, ("config-value", "capture", "fraction")),
        ({"capture": {"dtype": "int8"}}, ("config-value", "capture", "dtype")),
        ({"capture": {"quota": "2 bananas"}}, ("config-value", "2GB")),
        ({"capture": {"clients": ["../x"]}}, ("config-value", "../x")),
        ({"capture": {"store": "s3://b"}}, ("config-conflict", "store")),
        ({"capture": 3}, ("config-value", "capture", "3", "CaptureConfig")),
        ({"capture": {"rounds": [1]}, "rounds": [2]}, ("config-conflict",)),
        ({"seed": "x"}, ("config-value", "seed", "x")),
    ],
)
def test_what_cannot_be_captured_is_refused_before_training(
    tmp_path: Path, options: Any, words: tuple[str, ...]
) -> None:
    with refused(*words):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path), **options)


def test_a_url_cannot_be_audited_beside(tmp_path: Path) -> None:
    with refused("config-conflict", "audit=", "captures"):
        HonestButCurious(FedAvg(), "memory://bract-x/captures", audit="auto")


# A run of bract's own.


def federation(tmp_path: Path, **capture: Any) -> Federation:
    config = build_config(
        {
            "name": "study",
            "seed": 5,
            "data": {"image_size": 8},
            "model": {"name": "lenet-strided"},
            "capture": capture,
        }
    )
    run = RunDirectory(tmp_path / "study")
    run.create(config)
    return Federation(config, run)


def test_a_run_captures_what_its_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Hook:
        def __init__(self, strategy: Any, store: Any, **options: Any) -> None:
            made.append((store, options))

        def start(self, *_: Any, **__: Any) -> None: ...

    monkeypatch.setattr("bract.server.federation.HonestButCurious", Hook)
    chosen = {"every": 2, "fraction": 0.5, "quota": "1MB", "keep_rounds": 3, "dtype": "float16"}
    made_by = federation(tmp_path, **chosen)
    made_by.start(LoopbackGrid(APP, []), 1)
    ((store, options),) = made
    assert store.root == tmp_path / "study" / "captures"
    assert options["capture"] == CaptureConfig(**chosen) and options["seed"] == 5
    assert json.loads(options["capture"].model_dump_json())["quota"] == 10**6


def test_a_run_at_a_url_never_mixes_with_an_earlier_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/elsewhere"
    store = federation(tmp_path, store=url)._store()
    assert store.place == str(tmp_path / "elsewhere" / "study")
    (tmp_path / "elsewhere/study/round-0001/client-0").mkdir(parents=True)
    with refused("file-taken", tmp_path):
        federation(tmp_path, store=url)._store()
    resumed = federation(tmp_path, store=url)
    resumed.done = 1
    assert resumed._store().place == store.place
    remote = federation(tmp_path, store="memory://bract-run")._store()
    assert remote.place == "memory://bract-run/study"
