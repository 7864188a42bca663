"""The gate of a site: nothing of its data leaves but an answer, whatever message asks for it."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gate_messages
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gate_messages import COLUMNS, MARK, asked, bract_app
from refusals import check_named

from bract.client import NO_MEMORY, REFUSED, DefenseMod, Gate
from bract.config import build_config, dump_config
from bract.server.loopback import LoopbackGrid

MESSAGES = int(os.environ.get("BRACT_GATE_MESSAGES", "250"))
SEED = int(os.environ.get("BRACT_GATE_SEED", "7"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gate_messages.site_data(tmp_path)


def test_no_reply_to_any_message_holds_a_word_of_the_sites_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = count_openings(monkeypatch)
    drawn = gate_messages.Drawn(tmp_path, random.Random(SEED))
    seen: set[str] = set()
    ended = dict.fromkeys(("answered", "refused", "named"), 0)
    for one in itertools.islice(drawn.messages(), MESSAGES):
        before = len(opened)
        (reply,) = one.grid.send_and_receive([one.message])
        found = [t for t in texts(reply) if MARK in t and not one.repeats(t)]
        assert not found, (found, one)
        if not reply.has_error():
            ended["answered"] += 1
        elif is_constant(reply):
            ended["refused"] += 1
        else:
            assert len(opened) == before, (one, reply.error.reason)
            ended["named"] += 1
        seen.add(one.kind)
    assert seen == set(gate_messages.KINDS)
    assert min(ended.values()) > MESSAGES // 100, ended
    print(f"{MESSAGES} messages, {len(opened)} of them behind open data: {ended}")


def count_openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the clients whose gates let a message to the data, as they do."""
    opened: list[str] = []
    for name in ("open", "open_uncounted"):
        opens = getattr(Gate, name)

        def noted(gate: Gate, *values: Any, opens: Any = opens) -> None:
            opens(gate, *values)
            opened.append(gate.client)

        monkeypatch.setattr(Gate, name, noted)
    return opened


def texts(reply: Message) -> Iterator[str]:
    """Yield all that a server can read in a reply but its numbers."""
    if reply.has_error():
        yield str(reply.error.reason)
        return
    for name, record in reply.content.items():
        yield name
        for key, value in record.items():
            yield key
            if not isinstance(record, ArrayRecord):
                yield repr(value)


def is_constant(reply: Message) -> bool:
    """Return whether an error is one of the two that leave once the data are open."""
    reason = str(reply.error.reason)
    said = reason.removeprefix(reason.partition(": ")[0] + ": ")
    raised = said.removesuffix("'>")
    return REFUSED in (reason, raised) or NO_MEMORY in (reason, raised)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_server_does_not_read_a_column_off_the_classes_that_a_site_misses(
    column: str, file: Path
) -> None:
    known: list[str] = []
    reasons = set()
    for number in itertools.count(1):
        text = {"column": COLUMNS[0], "label": column, "classes": [*known, "a", "b"], "length": 4}
        config = build_config(
            {
                "name": "asked",
                "clients": 1,
                "rounds": 50,
                "data": {"name": "text", "input": "text", "text": text},
                "model": {"name": "text-encoder(width=16,depth=1,heads=2)"},
                "training": {"lr": 0.1, "local_steps": 1},
            }
        )
        reasons.add(ask(config, {"partition-id": 0, "data-path": str(file)}, number))
        known.append(f"{MARK}-{COLUMNS.index(column)}-{number - 1}")
        if number == 5:
            break
    (reason,) = reasons
    assert REFUSED in reason


def test_a_message_is_counted_before_the_data_are_opened(file: Path, tmp_path: Path) -> None:
    config = build_config(
        {
            "name": "asked",
            "clients": 1,
            "data": {"name": "csv", "input": "table", "table": _schema()},
            "model": {"name": "mlp"},
        }
    )
    node = {"partition-id": 0, "data-path": str(file), "state-dir": str(tmp_path / "state")}
    file.unlink()
    reasons = [ask(config, node, 1, "evaluate") for _ in range(2)]
    assert REFUSED in reasons[0]
    assert "was answered" in reasons[1]


def ask(config: Any, node: dict[str, Any], run: int, kind: str = "train") -> str:
    """Return the reason of the error that a site with this node configuration replies."""
    grid = LoopbackGrid(bract_app(), [node], {"federation": dump_config(config)}, run_id=run)
    message = grid.create_message(asked(random.Random(1), 1), kind, 1, "")
    (reply,) = grid.send_and_receive([message])
    return str(reply.error.reason)


def _schema() -> dict[str, Any]:
    column = {"name": COLUMNS[0], "kind": "categorical", "categories": ["a", "b"]}
    return {"columns": [column], "target": {"name": COLUMNS[2], "categories": ["a", "b"]}}


@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "query.statistics"])
@pytest.mark.parametrize("fails", ["raises", "replies", "replies 6"])
def test_an_apps_own_errors_stay_at_the_site_in_every_message(kind: str, fails: str) -> None:
    app = ClientApp(mods=[DefenseMod("adadefense")])

    @app.train()
    @app.evaluate()
    @app.query()
    @app.query("statistics")
    def work(message: Any, context: Any) -> Any:
        if fails == "raises":
            raise KeyError(f"{MARK} Doe")
        from flwr.app import Error

        code = int(fails.partition(" ")[2] or 0)
        return Message(Error(code, f"{MARK} Doe"), reply_to=message)

    grid = LoopbackGrid(app, [{}])
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "")])
    assert reply.error.reason == REFUSED


def test_queries_of_an_app_are_counted(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("max_rounds_total: 2")
    app = ClientApp(mods=[DefenseMod("adadefense")])

    @app.query()
    def rows(message: Any, context: Any) -> Any:
        return Message(RecordDict({"metrics": MetricRecord({"rows": 8})}), reply_to=message)

    node = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    grid = LoopbackGrid(app, [node])
    replies = [
        next(iter(grid.send_and_receive([grid.create_message(RecordDict(), "query", 1, "")])))
        for _ in range(3)
    ]
    assert [reply.has_content() for reply in replies] == [True, True, False]
    assert "max_rounds_total: 2" in str(replies[2].error.reason)


def replying(content: dict[str, Any], **mod: Any) -> tuple[ClientApp, list[str]]:
    """Return an app that answers every message with this content, and the kinds it was asked."""
    app, calls = ClientApp(mods=[DefenseMod("noise", std=1.0, **mod)]), list[str]()

    @app.train()
    @app.evaluate("fused")
    @app.evaluate()
    @app.query()
    @app.query("get_parameters")
    def work(message: Any, context: Any) -> Any:
        calls.append(message.metadata.message_type)
        return Message(RecordDict(content), reply_to=message)

    return app, calls


def sent_to(app: ClientApp, kind: str, content: dict[str, Any], **node: Any) -> Message:
    grid = LoopbackGrid(app, [node])
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(content), kind, 1, "")])
    return reply


def test_a_model_does_not_leave_by_a_query() -> None:
    app, calls = replying({"parameters": ArrayRecord({"w": as_array([0.25])})})
    reply = sent_to(app, "query.get_parameters", {})
    assert reply.error.reason == REFUSED
    assert calls


def as_array(values: list[float]) -> Any:
    import numpy as np
    from flwr.app import Array

    return Array(np.array(values, dtype=np.float32))


@pytest.mark.parametrize("key", ["server-round", "models"])
def test_a_value_that_is_checked_is_the_only_one_of_its_name(key: str) -> None:
    app, calls = replying({"metrics": MetricRecord({"num-examples": 40})})
    records = {name: ConfigRecord({"server-round": 1, "models": 1}) for name in ("a", "config")}
    records["config"][key] = 500
    reply = sent_to(app, "evaluate.fused", records)
    assert key in str(reply.error.reason)
    assert not calls


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_measurements_in_config_records_are_rounded_or_withheld_too(
    kind: str, tmp_path: Path
) -> None:
    weights = ArrayRecord({"w": as_array([0.5, 0.25])})
    found = {
        "fitres.metrics": ConfigRecord({"loss": 0.123456789, "each": [0.123456789]}),
        "metrics": MetricRecord({"num-examples": 40}),
    }
    app, _ = replying({**found, **({"arrays": weights} if kind == "train" else {})})
    content = {"config": ConfigRecord({"server-round": 1}), "arrays": weights}
    reply = sent_to(app, kind, content)
    record: Any = reply.content["fitres.metrics"]
    kept = {"train": "nan"}.get(kind, "0.123")
    assert [str(record["loss"]), str(record["each"][0])] == [kept, kept]


@pytest.mark.parametrize(
    ("content", "answered"),
    [
        ({"m": MetricRecord({"num-examples": 1, "loss": 0.5})}, False),
        ({"m": MetricRecord({"num-examples": 1, "correct": 1})}, False),
        ({"m": MetricRecord({"loss": 0.5})}, False),
        ({"m": MetricRecord({"losses": [0.5, 0.25]})}, False),
        ({"p": ConfigRecord({"loss": 0.5})}, False),
        ({"m": MetricRecord({"right": [1, 0, 1]})}, False),
        ({"p": ConfigRecord({"classes": ["benign", "malign"]})}, False),
        ({"p": ConfigRecord({"classes": ["benign", "malign"], "num-examples": 40})}, True),
        (
            {
                "m": MetricRecord({"num-examples": 40, "loss": 0.5}),
                "p": ConfigRecord({"num-examples": 3}),
            },
            False,
        ),
        ({"p": ConfigRecord({"loss": 0.5, "num-examples": 40})}, True),
        ({"m": MetricRecord({"num-examples": 40, "loss": 0.5})}, True),
        ({"m": MetricRecord({"num-examples": 3})}, True),
        ({"m": MetricRecord({"rows": 8}), "p": ConfigRecord({"device": "cpu"})}, True),
    ],
)
def test_scores_of_too_few_examples_leave_by_no_query(
    content: dict[str, Any], answered: bool
) -> None:
    app, _ = replying(content)
    reply = sent_to(app, "query", {})
    assert reply.has_content() is answered
    if not answered:
        assert reply.error.reason == REFUSED


@pytest.mark.parametrize("named", [True, False])
def test_an_apps_scores_leave_by_queries_once_a_round(named: bool, tmp_path: Path) -> None:
    app, calls = replying({"m": MetricRecord({"num-examples": 40, "loss": 0.5})})
    node: dict[str, Any] = {"state-dir": str(tmp_path)}
    grid = LoopbackGrid(app, [node], {"num-server-rounds": 3})

    def answered(kind: str, number: int) -> bool:
        config = ConfigRecord({"server-round": number} if named else {})
        message = grid.create_message(RecordDict({"config": config}), kind, 1, "")
        (reply,) = grid.send_and_receive([message])
        return bool(reply.has_content())

    asked = [answered("query", number) for number in (1, 1, 2, 2, 3, 3, 4)]
    wanted = [True, False, True, False, True, False, False]
    assert asked == (wanted if named else [True] * 3 + [False] * 4)
    assert answered("query.get_parameters", 1)  # a kind of its own
    assert len(calls) == 8


def test_the_policy_holds_for_queries_as_well(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("{require: [{name: pruning}]}")
    app, calls = replying({"metrics": MetricRecord({"rows": 8})})
    reply = sent_to(app, "query", {}, policy=str(tmp_path / "policy.yaml"))
    assert "pruning" in str(reply.error.reason)
    assert not calls


def test_a_second_record_does_not_become_the_start_of_the_update() -> None:
    weights = ArrayRecord({"w": as_array([0.5, 0.25])})
    app, _ = replying({"answer": weights, "metrics": MetricRecord({"num-examples": 40})})
    content: dict[str, Any] = {"config": ConfigRecord({"server-round": 1}), "arrays": weights}
    assert sent_to(app, "train", content).has_content()
    decoy = ArrayRecord({"w": as_array([0.51, 0.24])})
    refusal = str(sent_to(app, "train", {"a": decoy, **content}).error.reason)
    check_named(refusal, "a, arrays", "record=")


def test_whole_numbers_do_not_leave_beside_noise_that_covers_none_of_them(tmp_path: Path) -> None:
    import numpy as np
    from flwr.app import Array

    (tmp_path / "policy.yaml").write_text("max_epsilon: 8")
    site = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    counts = Array(np.array([[3, 0], [9, 9]], dtype=np.int64))
    weights = {"w": as_array([0.5, 0.25])}
    app = ClientApp(mods=[DefenseMod("noise", epsilon=1.0)])

    @app.train()
    def work(message: Any, context: Any) -> Any:
        arrays = ArrayRecord({**weights, "seen": counts})
        metrics = MetricRecord({"num-examples": 40})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    content: dict[str, Any] = {"config": ConfigRecord({"server-round": 1})}
    content["arrays"] = ArrayRecord({**weights, "seen": counts})
    assert "seen" in str(sent_to(app, "train", content, **site).error.reason)
