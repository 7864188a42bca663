"""The gate of a site: nothing of its data leaves but an answer, whatever message asks for it."""

import itertools
import os
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from bract.client import NO_MEMORY, REFUSED, DefenseMod
from bract.config import build_config, dump_config
from bract.errors import BractError
from bract.models import create_model
from bract.server.loopback import LoopbackGrid
from bract.versions import release

MARK = "MARK"
"""Every cell and column name of the site's file holds it, and so does the name of the file."""

COLUMNS = tuple(f"{MARK}-{name}" for name in ("name", "age", "diagnosis"))
KINDS = (
    "train",
    "train.default",
    "evaluate",
    "evaluate.fused",
    "evaluate.final",
    "query.advertise",
    "query.share",
    "query.open",
    "query.agree",
    "query.unmask",
    "query.hello",
    "query.deal",
    "query.partial",
    "query.default",
)
PER_CONFIGURATION = 4
MESSAGES = int(os.environ.get("BRACT_GATE_MESSAGES", "250"))


def bract_app() -> ClientApp:
    """Return bract's own ClientApp."""
    app: ClientApp = import_module("bract.client.app").app
    return app


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A site's own file, as a table and as texts: the last row of both breaks every schema."""
    path = tmp_path / f"{MARK}.csv"
    rows = [",".join(f"{MARK}-{column}-{i}" for column in range(3)) for i in range(60)]
    path.write_text("\n".join([",".join(COLUMNS), *rows, ",,"]) + "\n")
    (tmp_path / f"{MARK}-images" / "train" / f"{MARK}-class").mkdir(parents=True)
    (tmp_path / f"{MARK}-images" / "train" / f"{MARK}-class" / f"{MARK}.png").write_bytes(
        b"\x89PNG"
    )
    return path


def configurations(file: Path, draw: random.Random) -> dict[str, Any]:
    """Return a run's configuration that names columns, classes and schemas of the site's data."""
    known = [f"{MARK}-{draw.randrange(3)}-{i}" for i in range(draw.choice((2, 30, 59)))]
    column = draw.choice([*COLUMNS, "text"])
    text = {
        "task": draw.choice(["classification", "token-classification", "language-model"]),
        "column": draw.choice([*COLUMNS, "text"]),
        "label": column,
        "classes": known,
        "length": 4,
    }
    table = {
        "columns": [
            {"name": name, "kind": "categorical", "categories": known}
            if draw.random() < 0.7
            else {"name": name, "kind": "continuous", "low": 0.0, "high": 1.0}
            for name in draw.sample(COLUMNS, draw.choice((1, 2)))
        ],
        "target": draw.choice(
            [
                {"name": column, "categories": known},
                {"name": column, "mean": 0.0, "std": 1.0},
            ]
        ),
    }
    kind = draw.choice(["text", "csv", "csv", "folder", "digits"])
    data: dict[str, Any] = {"name": kind, "validation": draw.choice((0.0, 0.3))}
    if kind == "text":
        data |= {"input": "text", "text": text}
    elif kind == "csv":
        data |= {"input": "table", "table": table}
    else:
        data |= {"image_size": 8}
    model = {"text": "text-encoder(width=16,depth=1,heads=2)", "csv": "mlp"}.get(kind, "mlp")
    return {
        "name": "asked",
        "clients": 3,
        "rounds": 50,
        "data": data,
        "model": {"name": model},
        "training": draw.choice(
            [
                {"lr": 0.1, "local_steps": 1, "batch_size": 2},
                {"lr": 0.1, "local_steps": 1, "private": {"noise_multiplier": 1.0}},
            ]
        ),
        "encryption": draw.choice(["none", "masks", "paillier"]),
        "defenses": draw.choice([[], [{"name": "noise", "std": 0.1, "clip": 1.0}]]),
    }


def asked(draw: random.Random, number: int) -> RecordDict:
    """Return the content of a message to bract's own app."""
    instructions: dict[str, Any] = {
        "server-round": draw.choice([number, number, -1, 2**60]),
        "bract-version": release(),
        "bract-session": draw.choice(["run", f"run-{number}"]),
        "models": draw.choice([1, 3, 400]),
    }
    if draw.random() < 0.1:
        instructions.pop(draw.choice(list(instructions)))
    model = create_model("mlp", classes=10, channels=1, image_size=8)
    content = RecordDict({"config": ConfigRecord(instructions)})
    if draw.random() < 0.2:
        content["arrays"] = ArrayRecord(draw.choice([model.state_dict(), {}]))
    return content


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


def refusals_alone(reply: Message) -> bool:
    """Return whether an error after the data were open is one of the two constant ones."""
    reason = str(reply.error.reason)
    return REFUSED in reason or NO_MEMORY in reason


def test_no_reply_to_any_message_holds_a_word_of_the_sites_file(file: Path, tmp_path: Path) -> None:
    draw = random.Random(7)
    seen: set[str] = set()
    ended = {"answered": 0, "refused": 0, "named": 0}
    config: Any = None
    for number in range(MESSAGES):
        if config is None or number % PER_CONFIGURATION == 0:
            try:
                config = build_config(configurations(file, draw))
            except BractError:
                config = None
                continue
        images = config.data.name in ("folder", "digits")
        node: dict[str, Any] = {
            "partition-id": draw.randrange(3),
            "data-path": str(tmp_path / f"{MARK}-images" if images else file),
            "name": "site",
        }
        grid = LoopbackGrid(
            bract_app(), [node], {"federation": dump_config(config)}, run_id=number + 1
        )
        kind = draw.choice(KINDS)
        sent = grid.create_message(asked(draw, 1), kind, 1, "")
        (reply,) = grid.send_and_receive([sent])
        found = [text for text in texts(reply) if MARK in text and not _sent(text, sent, config)]
        assert not found, (kind, dump_config(config), found)
        seen.add(kind)
        if not reply.has_error():
            ended["answered"] += 1
        else:
            ended["refused" if refusals_alone(reply) else "named"] += 1
    assert seen == set(KINDS)
    assert min(ended.values()) > MESSAGES // 100, ended


def _sent(text: str, sent: Message, config: Any) -> bool:
    """Return whether a text repeats the request: markers of the configuration are the server's."""
    own = dump_config(config)
    words = [word.strip("'\"(),.;:[]") for word in text.split() if MARK in word]
    return all(word in own for word in words)


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
    assert sent_to(app, "train", {"a": decoy, **content}).error.reason == REFUSED


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
