"""What left the sites: every reply by name, kind and size, and what rules flag in it."""

import io
import json
import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FixedClipping
from flwr.serverapp.strategy import FedAvg

from bract import listen
from bract.audit.uncaptured import read_left
from bract.installed import plugins
from bract.schema import LeftReply, LeftThing
from bract.server import DisclosureRule, HonestButCurious
from bract.server.disclosures import RULES
from bract.server.loopback import LoopbackGrid
from bract.server.parts import numpy_array

Content = dict[str, Any]

CLASSES, WIDTH = 4, 12

RNG = np.random.default_rng(7)


def model(step: float = 0.0) -> ArrayRecord:
    """A linear layer of 12 inputs and 4 classes."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(CLASSES, WIDTH)).astype(np.float32)
    return ArrayRecord(
        {"fc.weight": Array(weight + np.float32(step)), "fc.bias": Array(np.zeros(CLASSES, "f4"))}
    )


def with_own_head(rows: int = 10) -> ArrayRecord:
    """The model with a layer that the server did not send."""
    head = {"head.weight": Array(RNG.random((rows, WIDTH))), "head.bias": Array(RNG.random(rows))}
    return ArrayRecord({**model(0.01), **head})


def nested(depth: int, inner: str) -> str:
    """JSON of so many objects in one another, with ``inner`` in the last one."""
    return '{"a": ' * depth + inner + "}" * depth


def numpy_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def app_of(make: Callable[[], Content], query: Callable[[], Content] | None = None) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = {"arrays": model(0.01), **make()}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        scores = MetricRecord({"num-examples": 40, "accuracy": 0.5})
        return Message(RecordDict({"metrics": scores}), reply_to=message)

    if query is not None:

        @app.query()
        def asked(message: Message, context: Context) -> Message:
            return Message(RecordDict(query()), reply_to=message)

    return app


def run(
    folder: Path, app: ClientApp, clients: int = 1, rounds: int = 1, **options: Any
) -> list[LeftReply]:
    grid = LoopbackGrid(app, [{"id": i} for i in range(clients)])
    strategy = HonestButCurious(_fedavg(clients), folder / "captures", **options)
    strategy.start(grid, model(), num_rounds=rounds)
    return left(folder)


def replied(folder: Path, app: ClientApp) -> list[LeftReply]:
    """Return what is listed of one reply to a loop without a strategy, which may hold anything."""
    grid = listen(LoopbackGrid(app, [{}]), folder / "captures")
    content = RecordDict({"arrays": model()})
    list(grid.send_and_receive([Message(content, message_type="train", dst_node_id=1)]))
    return left(folder)


def _fedavg(clients: int) -> FedAvg:
    return FedAvg(min_train_nodes=clients, min_evaluate_nodes=clients, min_available_nodes=clients)


def left(folder: Path) -> list[LeftReply]:
    return [line for path in folder.rglob("left.jsonl") for line in read_left(path.parent)]


def flagged(replies: list[LeftReply]) -> dict[str, set[str]]:
    """Return the rules that flag a thing, by its name."""
    found: dict[str, set[str]] = {}
    for reply in replies:
        for thing in reply.things:
            if thing.flags:
                found.setdefault(thing.name, set()).update(f.rule for f in thing.flags)
    return found


def metrics(**more: Any) -> Content:
    named = {name.replace("__", "-"): value for name, value in more.items()}
    return {"metrics": MetricRecord({"num-examples": 40, "train_loss": 0.51, **named})}


def config(**more: Any) -> Content:
    return {**metrics(), "extra": ConfigRecord(more)}


def arrays(**more: Any) -> Content:
    held = {name: Array(np.asarray(value, np.float32)) for name, value in more.items()}
    return {**metrics(), "more": ArrayRecord(held)}


PICKLED = [bytes([0x80, protocol]) for protocol in (2, 3, 4, 5)]


def random_bytes(*beginnings: bytes) -> list[bytes]:
    """Return 256 random bytes after each beginning."""
    draw = np.random.default_rng(3)
    return [begins + draw.bytes(256) for begins in beginnings]


def in_format(begins: bytes, length: int = 512) -> Callable[[], Content]:
    """Return what makes a reply of a file that begins so."""
    return lambda: config(kept=begins + bytes([200]) * (length - len(begins)))


ORDINARY: dict[str, Callable[[], Content]] = {
    "quickstart": lambda: metrics(),
    "timings": lambda: metrics(train_seconds=3.0, epochs=3, steps=5, lr=0.1, batch_size=8),
    "sizes": lambda: metrics(image_size=8, n_classes=4, num_layers=2, num_batches=5, seed=3),
    "history": lambda: metrics(losses=[0.9, 0.5, 0.3, 0.2], lr_per_step=[0.1] * 200),
    "per class accuracy": lambda: metrics(class_accuracy=[1.0, 0.0, 1.0, 0.5]),
    "roc": lambda: metrics(roc_thresholds=RNG.random(100).tolist()),
    "private": lambda: metrics(epsilon=3.2, delta=1e-5, noise_multiplier=1.1),
    "technical words": lambda: config(device="cuda:0", status="ok", optimizer="AdamW"),
    "versions": lambda: config(torch_version="2.4.1", client_id="site-1", run="a1b2c3d4e5f6"),
    "settings": lambda: config(settings=json.dumps({"epochs": 3, "lr": 0.1, "batch_size": 8})),
    "control variates": lambda: {**metrics(), "control": model(0.5)},
    "momentum": lambda: arrays(momentum=RNG.random((CLASSES, WIDTH))),
    "moments of the optimizer": lambda: {**metrics(), "exp_avg": model(0.5)},
    "a head of the client's own": lambda: {**metrics(), "arrays": with_own_head()},
    "momentum in one row": lambda: arrays(momentum=RNG.random(CLASSES * WIDTH + CLASSES)),
    "steps of the optimizer": lambda: arrays(step=[3.0]),
    "a sketch in place of the update": lambda: {
        **metrics(),
        "arrays": ArrayRecord({"sketch": Array(RNG.random(200).astype("f4"))}),
    },
    "norms": lambda: metrics(grad_norms=RNG.random(CLASSES * WIDTH).tolist(), drift=0.25),
    "ciphertexts": lambda: config(sealed=random_bytes(b"", b"BM", *PICKLED, b"\x1f\x8b", b"n+1")),
    "one ciphertext": lambda: config(sealed=random_bytes(b"\x80\x04")[0]),
    "few switches": lambda: config(used=json.dumps({"layers": [True, False, True]})),
    "an object with many keys": lambda: config(
        settings=json.dumps({f"{chr(97 + n % 26)}{chr(97 + n // 26)}": True for n in range(40)})
    ),
    "no float": lambda: metrics(best_epoch=2, rank=1, early_stopped=True),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_nothing_of_an_ordinary_app_is_flagged(name: str, tmp_path: Path) -> None:
    assert flagged(replied(tmp_path, app_of(ORDINARY[name]))) == {}


def kept_so(value: Any) -> Callable[[], Content]:
    return lambda: config(kept=value)


def one_an_example() -> dict[str, Any]:
    """Lists with an entry for each of 40 examples, of every type."""
    switches = [True, False] * 20
    held: dict[str, Any] = {
        "switches": switches,
        "numbers": [0, 1] * 20,
        "numbers in texts": ["0", "1"] * 20,
        "technical words": ["yes", "no"] * 20,
        "null and switches": [None, True] * 20,
        "null and numbers": [None, 0.5] * 20,
        "null": [None] * 40,
        "switches and numbers": [True, 0] * 20,
        "lists": [[0, 1, 2]] * 40,
        "lists of switches": [[True, False]] * 40,
        "objects": [{"ok": True}, {"ok": False}] * 20,
        "one key each": {str(n): bool(n % 3) for n in range(40)},
        "one name each": {f"case-{n}": None for n in range(40)},
    }
    found: dict[str, Any] = {f"{kind}, of JSON": json.dumps(v) for kind, v in held.items()}
    found |= {"switches": switches, "texts": ["yes", "no"] * 20, "bytes": [b"\x00", b"\x01"] * 20}
    found |= {
        f"{kind}, of numpy": numpy_bytes(np.array(value))
        for kind, value in {
            "switches": switches,
            "texts": ["yes", "no"] * 20,
            "rows": [[0, 1, 2]] * 40,
        }.items()
    }
    return found


def one_mean_a_class() -> list[float]:
    return [float(value) for value in RNG.random(CLASSES * WIDTH)]


LEAKY: dict[str, tuple[Callable[[], Content], dict[str, set[str]]]] = {
    "few examples": (
        lambda: {"metrics": MetricRecord({"num-examples": 7, "train_loss": 0.51})},
        {"num-examples": {"small-count"}},
    ),
    "few positives": (lambda: metrics(val_positives=3), {"val_positives": {"small-count"}}),
    "counts by class": (
        lambda: metrics(label_counts=[20, 10, 5, 5]),
        {"label_counts": {"label-histogram", "small-count"}},
    ),
    "counts under any name": (
        lambda: metrics(stats=[20, 0, 10, 10]),
        {"stats": {"label-histogram"}},
    ),
    "shares by class": (
        lambda: metrics(balance=[0.5, 0.25, 0.125, 0.125]),
        {"balance": {"label-histogram"}},
    ),
    "one count a class": (
        lambda: metrics(label_0=12, label_1=28),
        {"label_0": {"label-histogram"}, "label_1": {"label-histogram"}},
    ),
    "counts by name of class": (
        lambda: metrics(n_benign=29, n_malignant=11),
        {"n_benign": {"label-histogram"}, "n_malignant": {"label-histogram"}},
    ),
    "counts in a text": (
        lambda: config(info=json.dumps({"class_counts": {"0": 22, "1": 18}})),
        {"info": {"label-histogram"}},
    ),
    "labels beside a key that stands twice": (
        lambda: config(info='{"labels": [3, 1, 4, 1], "a": 1, "a": 2}'),
        {"info": {"labels"}},
    ),
    "labels under a key that stands twice": (
        lambda: config(info='{"labels": [3, 1, 4, 1], "labels": 0}'),
        {"info": {"labels"}},
    ),
    "labels beside a number of 400 digits": (
        lambda: config(info=f'{{"labels": [3, 1, 4, 1], "a": {"9" * 400}}}'),
        {"info": {"labels"}},
    ),
    "labels far within JSON": (
        lambda: config(info=nested(40, '{"labels": [3, 1, 4, 1]}')),
        {"info": {"labels"}},
    ),
    "labels behind a long list": (
        lambda: config(info=f'{{"a": [{", ".join(["[]"] * 10_000)}, {{"labels": [3, 1]}}]}}'),
        {"info": {"labels"}},
    ),
    "more of JSON than is read": (
        lambda: config(info=nested(100_000, '{"labels": [3, 1, 4, 1]}')),
        {"info": {"text"}},
    ),
    "more of JSON than is read, under a technical key": (
        lambda: config(state=nested(100_000, '{"labels": [3, 1, 4, 1]}')),
        {"state": {"text"}},
    ),
    "names in an array of numpy": (
        lambda: config(kept=numpy_bytes(np.array(["Ada Lovelace", "Grace Hopper"]))),
        {"kept": {"names"}},
    ),
    "objects in an array of numpy": (
        lambda: config(kept=numpy_bytes(np.array([{"a": 1}] * 3))),
        {"kept": {"file"}},
    ),
    "a row of a layer for each example": (
        lambda: {**metrics(), "arrays": with_own_head(40)},
        {"head.weight": {"other-array"}, "head.bias": {"other-array"}},
    ),
    "means by class": (
        lambda: config(class_means=one_mean_a_class()),
        {"class_means": {"class-means"}},
    ),
    "prototypes": (
        lambda: arrays(proto=np.ones((CLASSES, WIDTH))),
        {"proto": {"class-means"}},
    ),
    "one prototype a class": (
        lambda: arrays(proto_0=np.ones(WIDTH), proto_3=np.ones(WIDTH)),
        {"proto_0": {"class-means"}, "proto_3": {"class-means"}},
    ),
    "labels": (lambda: metrics(y_true_labels=[0, 1, 1, 0, 3]), {"y_true_labels": {"labels"}}),
    "a loss of each example": (
        lambda: metrics(example_scores=RNG.random(40).tolist()),
        {"example_scores": {"values"}},
    ),
    "people": (lambda: config(staff=["Ada Lovelace", "Grace Hopper"]), {"staff": {"names"}}),
    "files": (lambda: config(worst="scans/p0017_t1.nii.gz"), {"worst": {"names"}}),
    "an address": (lambda: config(contact="ada@hospital.org"), {"contact": {"names"}}),
    "a diagnosis": (lambda: config(finding="melanoma"), {"finding": {"text"}}),
    "a note": (
        lambda: config(status="the patient of room 4 has left the ward"),
        {"status": {"text"}},
    ),
    "a batch of pictures": (
        lambda: arrays(first_batch=np.ones((8, 3, 16, 16))),
        {"first_batch": {"other-array"}},
    ),
    "pictures beside a sketch in place of the update": (
        lambda: {
            **metrics(),
            "arrays": ArrayRecord({"sketch": Array(RNG.random(2000).astype("f4"))}),
            "kept": ArrayRecord({"first_batch": Array(np.ones((2, 3, 16, 16), "f4"))}),
        },
        {"first_batch": {"other-array"}},
    ),
    "a row for each example": (lambda: arrays(z=np.ones((40, 1))), {"z": {"other-array"}}),
    "features that vary together": (
        lambda: arrays(cov=np.eye(64)),
        {"cov": {"other-array"}},
    ),
    "a picture's file": (
        lambda: config(thumb=b"\x89PNG\r\n\x1a\n" + bytes(range(128, 256))),
        {"thumb": {"file"}},
    ),
    "pickled objects": (
        lambda: config(state=[pickle.dumps(RNG.random(40), protocol) for protocol in (2, 3, 4, 5)]),
        {"state": {"file"}},
    ),
    **{
        f"a file of {kind}": (in_format(begins), {"kept": {"file"}})
        for kind, begins in {
            "BMP": b"BM" + (512).to_bytes(4, "little"),
            "gzip": b"\x1f\x8b\x08\x00",
            "NIfTI": bytes(344) + b"n+1\x00",
            "NIfTI's header": bytes(344) + b"ni1\x00",
            "NIfTI 2": (540).to_bytes(4, "little") + b"n+2\x00\r\n\x1a\n",
            "Feather": b"FEA1",
            "JPEG 2000": b"\x00\x00\x00\x0cjP  \r\n\x87\n",
            "a JPEG 2000 stream": b"\xff\x4f\xff\x51",
        }.items()
    },
    "bytes of text": (lambda: config(blob=b"/data/patients/0017/ct.dcm"), {"blob": {"names"}}),
}


LEAKY |= {
    "prototypes under the model's names": (
        lambda: {**metrics(), "prototypes": model(0.5)},
        {"fc.weight": {"class-means"}, "fc.bias": {"class-means"}},
    ),
    "labels under a name of the model": (
        lambda: {**metrics(), "labels": ArrayRecord({"fc.bias": Array(np.arange(CLASSES))})},
        {"fc.bias": {"labels"}},
    ),
    "a text in keys": (
        lambda: config(info=nested(100, "0").replace('"a"', f'"{"a note on a man " * 9}"')),
        {"info": {"text"}},
    ),
    "a text in many keys": (
        lambda: config(info=json.dumps({f"was seen on day {n}": 0.5 for n in range(900)})),
        {"info": {"text"}},
    ),
    "numbers and null": (
        lambda: config(info=json.dumps({"z": [*RNG.random(599), None]})),
        {"info": {"values"}},
    ),
    "a list for each number": (
        lambda: config(info=json.dumps({"z": [[v] for v in RNG.random(600)]})),
        {"info": {"values"}},
    ),
    "an object for each number": (
        lambda: config(info=json.dumps([{"z": v} for v in RNG.random(600)])),
        {"info": {"values"}},
    ),
    **{
        f"an entry for each example, {kind}": (kept_so(value), {"kept": {"values"}})
        for kind, value in one_an_example().items()
    },
    "a switch for each example, in an array": (
        lambda: arrays(correct=np.ones(40, bool)),
        {"correct": {"other-array"}},
    ),
    "a switch for each example beside others": (
        lambda: config(info=json.dumps({"accuracy": 0.5, "correct": [True, False] * 20})),
        {"info": {"values"}},
    ),
    "a picture in lists": (
        lambda: config(info=json.dumps({"z": RNG.random((28, 28)).tolist()})),
        {"info": {"values"}},
    ),
}


@pytest.mark.parametrize("name", LEAKY)
def test_what_describes_people_is_flagged(name: str, tmp_path: Path) -> None:
    make, expected = LEAKY[name]
    assert flagged(replied(tmp_path, app_of(make))) == expected


def test_more_numbers_than_rules_read_are_flagged_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.server.things.MOST_NUMBERS", 70)
    app = app_of(lambda: metrics(pixels=RNG.random(100).tolist(), few=RNG.random(60).tolist()))
    assert flagged(replied(tmp_path, app)) == {"pixels": {"values"}}


def test_every_reply_is_listed_by_name_kind_and_size_and_without_values(tmp_path: Path) -> None:
    app = app_of(
        lambda: config(note="a note of nine words that is said aloud"),
        query=lambda: {"values": MetricRecord({"pixels": [0.123456789] * 100})},
    )
    grid = LoopbackGrid(app, [{}, {}])
    strategy = HonestButCurious(_fedavg(2), tmp_path / "captures")
    ask = [Message(RecordDict(), message_type="query", dst_node_id=n) for n in (1, 2)]
    assert len(list(grid.send_and_receive(ask))) == 2  # over Flower's own grid, before the start
    strategy.start(grid, model(), num_rounds=2)
    replies = left(tmp_path)
    kinds = [(r.message, r.round, r.client) for r in replies]
    assert kinds == [
        *(("query", None, f"node-{n}") for n in (1, 2)),
        *((m, i, f"node-{n}") for i in (1, 2) for m in ("train", "evaluate") for n in (1, 2)),
    ]
    things = {(t.record, t.name): t for r in replies for t in r.things}
    pixels = things["values", "pixels"]
    assert (pixels.kind, pixels.dtype, pixels.shape, pixels.size) == (
        "numbers",
        "float",
        (100,),
        800,
    )
    note = things["extra", "note"]
    assert (note.kind, note.size, note.value) == ("text", 39, None)
    weight = things["arrays", "fc.weight"]
    assert (weight.model, weight.dtype, weight.shape) == (True, "float32", (CLASSES, WIDTH))
    whole = "".join(p.read_text() for p in tmp_path.rglob("left.jsonl"))
    assert "aloud" not in whole and "0.1234" not in whole


def test_a_layout_of_model_arrays_is_listed_once(tmp_path: Path) -> None:
    replies = [r for r in run(tmp_path, app_of(metrics), 2, 3) if r.message == "train"]
    assert [sum(t.model for t in r.things) for r in replies] == [2, 0, 0, 0, 0, 0]
    assert len({r.layouts["arrays"] for r in replies}) == 1


def test_values_are_stored_where_the_operator_asks(tmp_path: Path) -> None:
    replies = run(tmp_path, app_of(lambda: metrics(note=[1.5, 2.5])), capture={"values": True})
    (note,) = [t for r in replies for t in r.things if t.name == "note"]
    assert note.value == "[1.5, 2.5]"


def test_nothing_is_listed_where_capturing_is_off(tmp_path: Path) -> None:
    assert run(tmp_path, app_of(metrics), capture={"enabled": False}) == []


def test_rounds_that_are_not_captured_are_listed(tmp_path: Path) -> None:
    replies = run(tmp_path, app_of(metrics), rounds=3, capture={"rounds": [2]})
    assert {r.round for r in replies} == {1, 2, 3}


def test_a_strategy_around_the_hook_and_a_loop_of_ones_own_are_listed(tmp_path: Path) -> None:
    around = FixedClipping(HonestButCurious(_fedavg(2), tmp_path / "a"), 0.0, 1.0, 2)
    around.start(LoopbackGrid(app_of(metrics), [{}, {}]), model(), num_rounds=1)
    assert [r.message for r in left(tmp_path / "a")] == ["train"] * 2 + ["evaluate"] * 2
    grid = listen(LoopbackGrid(app_of(metrics), [{}]), tmp_path / "b")
    content = RecordDict({"arrays": model()})
    ids = list(grid.push_messages([Message(content, message_type="train", dst_node_id=1)]))
    assert len(list(grid.pull_messages(ids))) == 1
    assert [r.message for r in left(tmp_path / "b")] == ["train"]


def test_replies_of_another_run_in_the_process_are_not_listed(tmp_path: Path) -> None:
    mine = HonestButCurious(_fedavg(1), tmp_path / "captures")
    other = LoopbackGrid(app_of(metrics, query=metrics), [{}])
    list(other.send_and_receive([Message(RecordDict(), message_type="query", dst_node_id=1)]))
    mine.start(LoopbackGrid(app_of(metrics), [{}]), model(), num_rounds=1)
    assert {r.message for r in left(tmp_path)} == {"train", "evaluate"}


def test_an_error_is_a_text_that_left(tmp_path: Path) -> None:
    def fail() -> Content:
        raise FileNotFoundError("/data/patients/0017/ct.dcm")

    (reply, *_) = run(tmp_path, app_of(fail))
    (thing,) = reply.things
    assert (thing.source, thing.kind, [f.rule for f in thing.flags]) == ("error", "text", ["names"])


def test_policy_shows_as_withheld_or_rounded_numbers(tmp_path: Path) -> None:
    make = lambda: metrics(a=float("nan"), b=0.1234567, c=0.123, d=[float("nan")] * 3)  # noqa: E731
    things: dict[str, LeftThing] = {
        t.name: t for r in run(tmp_path, app_of(make)) for t in r.things if r.message == "train"
    }
    found = {name: things[name].came for name in "abcd"}
    assert found == {"a": "withheld", "b": "exact", "c": "rounded", "d": "withheld"}


def test_a_claimed_epsilon_is_stored_as_a_claim(tmp_path: Path) -> None:
    replies = run(tmp_path, app_of(lambda: metrics(epsilon=3.2, adam_eps=1e-8)))
    claims = {t.name: t.claim for r in replies for t in r.things if t.claim is not None}
    assert claims == {"epsilon": 3.2}


class Weekday(DisclosureRule):
    name = "weekday"
    reason = "says on which day people came"

    def flagged(self, things: Any, about: Any) -> Any:
        return [t for t in things if "monday" in t.texts]


class Faulty(DisclosureRule):
    name = "faulty"
    reason = "never"
    ran: ClassVar[list[int]] = []

    def flagged(self, things: Any, about: Any) -> Any:
        raise RuntimeError("of another package")


def test_a_package_adds_a_rule_and_a_faulty_one_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    list(RULES)
    monkeypatch.setitem(RULES._entries, "weekday", Weekday)
    monkeypatch.setitem(RULES._entries, "faulty", Faulty)
    monkeypatch.setattr(plugins, "package_of", lambda entry: "days 1.0")
    with caplog.at_level(logging.WARNING):
        found = flagged(run(tmp_path, app_of(lambda: config(state="monday"))))
    assert found == {"state": {"weekday"}}
    assert "days 1.0" in caplog.text


HANGING = {
    "hyphens": "Ab" + "-Aaa" * 60 + "!",
    "one word": "a" * 90_000,
    "short words": "a b" * 30_000,
    "capitals": "A" * 90_000,
    "at signs": "a@" * 40_000,
    "dots and slashes": "/a." * 30_000,
    "a key that stands often": '{"a": {' + ", ".join(['"a": 1'] * 100_000) + "}}",
    "keys under a long one": f'{{"{"a" * 500_000}": {{' + ", ".join(['"a": 1'] * 100_000) + "}}",
}


@pytest.mark.parametrize("text", HANGING.values(), ids=HANGING)
def test_no_text_of_a_client_holds_the_server(text: str, tmp_path: Path) -> None:
    """Rules look at words one by one, in a time that grows with their length."""
    begun = time.process_time()
    many = [text[:300]] * 2000
    replied(tmp_path, app_of(lambda: config(note=text, notes=many)))
    assert time.process_time() - begun < 10.0


@pytest.mark.parametrize(
    "more",
    [
        lambda: {"prototypes": ArrayRecord({"by_class": Array(RNG.random((CLASSES, WIDTH)))})},
        lambda: {"other": ArrayRecord({"seen": Array(np.array([9, 4, 1, 2]))})},
    ],
    ids=["means by class", "counts"],
)
def test_an_array_is_the_models_by_its_name_and_not_by_its_shape(
    more: Callable[[], Content], tmp_path: Path
) -> None:
    for reply in replied(tmp_path, app_of(lambda: {**metrics(), **more()})):
        assert {t.name for t in reply.things if t.model} == {"fc.weight", "fc.bias"}


LAYERS = {"fc1.weight": (200, 784), "fc1.bias": (200,), "fc2.weight": (10, 200), "fc2.bias": (10,)}
LINEAR = {"fc.weight": (10, 784), "fc.bias": (10,)}


def flagged_beside(folder: Path, layers: dict[str, tuple[int, ...]], **more: Any) -> set[str]:
    """Return what is flagged of a reply that holds layers as they were sent, and more."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        held = {name: Array(np.ones(shape, "f4")) for name, shape in (layers | more).items()}
        return Message(RecordDict({"arrays": ArrayRecord(held)}), reply_to=message)

    sent = ArrayRecord({name: Array(np.zeros(shape, "f4")) for name, shape in layers.items()})
    grid = listen(LoopbackGrid(app, [{}]), folder / "captures")
    asked = Message(RecordDict({"arrays": sent}), message_type="train", dst_node_id=1)
    list(grid.send_and_receive([asked]))
    return set(flagged(left(folder)))


@pytest.mark.parametrize(
    ("name", "shape", "layer"),
    [
        ("head.weight", (20, 200), True),
        ("head.bias", (20,), True),
        ("norm.running_mean", (200,), True),
        ("norm.num_batches_tracked", (), True),
        ("memory.weight", (500, 784), False),
        ("memory.weight", (20, 784), False),
        ("memory.weight", (500, 200), False),
        ("memory.bias", (392_000,), False),
        ("memory.bias", (784,), False),
        ("cache.running_mean", (392_000,), False),
    ],
)
def test_a_layer_of_the_clients_own_takes_no_examples_and_has_no_more_rows_than_the_models(
    name: str, shape: tuple[int, ...], layer: bool, tmp_path: Path
) -> None:
    assert flagged_beside(tmp_path, LAYERS, **{name: shape}) == (set() if layer else {name})


@pytest.mark.parametrize(("rows", "layer"), [(20, True), (500, False)])
def test_a_layer_on_the_examples_themselves_has_few_rows(
    rows: int, layer: bool, tmp_path: Path
) -> None:
    found = flagged_beside(tmp_path, LINEAR, **{"own.weight": (rows, 784)})
    assert found == (set() if layer else {"own.weight"})


def test_json_beyond_what_is_walked_in_one_reply_is_flagged(tmp_path: Path) -> None:
    many = {"a": json.dumps([[]] * 60_000), "b": json.dumps([[]] * 60_000), "c": "no", "d": "[[]]"}
    found = flagged(replied(tmp_path, app_of(lambda: config(**many))))
    assert {name for name, rules in found.items() if "unread" in rules} == {"b", "d"}


@pytest.mark.parametrize("record", ["exp_avg", "target", "mean"])
def test_states_of_the_model_are_not_flagged(record: str, tmp_path: Path) -> None:
    assert flagged(replied(tmp_path, app_of(lambda: {**metrics(), record: model(0.5)}))) == {}


@pytest.mark.parametrize("record", ["a_fisher", "control", "zeros"])
def test_a_second_record_with_the_models_names_is_listed_as_another(
    record: str, tmp_path: Path
) -> None:
    """Moments of an optimizer or Fisher information have the names of what they are of."""
    for reply in replied(tmp_path, app_of(lambda: {**metrics(), record: model(0.5)})):
        found = {(t.record, t.name) for t in reply.things if t.model}
        assert found == {("arrays", "fc.weight"), ("arrays", "fc.bias")}
        others = {t.name for t in reply.things if t.record == record}
        assert others == {"fc.weight", "fc.bias"} and reply.layouts.keys() == {"arrays"}


def test_a_reply_that_cannot_be_listed_counts_as_one(tmp_path: Path) -> None:
    wide = ArrayRecord({"x": Array("float32", (10**16,), "numpy.ndarray", b"1234")})
    (reply,) = replied(tmp_path, app_of(lambda: {**metrics(labels=[1, 0]), "wide": wide}))
    assert reply.unlisted > 0 and not reply.things


def test_texts_that_a_header_alone_claims_are_not_made() -> None:
    """Texts of no width take no bytes, so that a hundred of them could claim a billion."""
    head = io.BytesIO()
    claimed = {"descr": "<U0", "fortran_order": False, "shape": (10**9,)}
    np.lib.format.write_array_header_1_0(head, claimed)
    assert numpy_array(head.getvalue()) is None
    assert numpy_array(numpy_bytes(np.array(["a"]))) is not None


def test_a_long_line_is_counted_and_not_written(tmp_path: Path) -> None:
    many = {f"{'n' * 150}{place}": place for place in range(19_000)}
    (reply,) = replied(tmp_path, app_of(lambda: metrics(**many)))
    assert reply.unlisted > 19_000 and not reply.things
    (file,) = tmp_path.rglob("left.jsonl")
    assert file.stat().st_size < 10_000


def test_arrays_of_bfloat16_are_looked_at(tmp_path: Path) -> None:
    """Flower has them as bytes of a kind of their own."""
    held = Array("bfloat16", (2,), "bfloat16", b"\x80?\x00@")
    (reply,) = replied(tmp_path, app_of(lambda: {**metrics(), "x": ArrayRecord({"half": held})}))
    assert not reply.unlisted
    (thing,) = (t for t in reply.things if t.name == "half")
    assert (thing.dtype, thing.shape, thing.model) == ("bfloat16", (2,), False)
