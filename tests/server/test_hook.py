import json
import logging
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FixedClipping
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from refusals import refused
from safetensors import SafetensorError

from bract import ObservationStore
from bract.audit.uncaptured import read_missed
from bract.inputs.base import what_is_audited
from bract.protocol.records import to_arrays
from bract.schema import ClientDeclaration
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid
from bract.server.recorder import Recorder
from bract.strategies import FedAvg as BractFedAvg

STRANGERS_APP = ClientApp()


@STRANGERS_APP.train()
def _train(message: Message, context: Context) -> Message:
    """A client that knows nothing of bract: it moves each weight by a step of its own."""
    step = 0.25 * (int(context.node_config["id"]) + 1)
    arrays = message.content.array_records["arrays"]
    moved = ArrayRecord()
    for name, array in arrays.items():
        value = array.numpy()
        change = np.float32(-step) if value.dtype == np.float32 else 1
        moved[name] = Array(np.asarray(value + change))
    metrics = MetricRecord({"num-examples": 10 + int(context.node_config["id"]), "loss": step})
    return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)


@STRANGERS_APP.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 5, "accuracy": 0.5})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def strangers_grid() -> LoopbackGrid:
    random.seed(0)  # Flower shuffles the nodes, and with them the order of floating point sums
    return LoopbackGrid(STRANGERS_APP, [{"id": i} for i in range(3)])


def initial() -> ArrayRecord:
    generator = torch.Generator().manual_seed(0)
    return ArrayRecord(
        {
            "conv.weight": Array(torch.randn(2, 1, 3, 3, generator=generator).numpy()),
            "bn.running_mean": Array(np.zeros(2, np.float32)),
            "bn.num_batches_tracked": Array(np.array(0, np.int64)),
        }
    )


def as_bytes(record: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in record.items()}


@pytest.mark.parametrize("make", [FedAvg, FedAdam, lambda: FedProx(proximal_mu=0.1)])
def test_a_wrapped_strategy_ends_with_the_same_bits(make: Any, tmp_path: Path) -> None:
    plain = make().start(strangers_grid(), initial(), num_rounds=3)
    wrapped = HonestButCurious(make(), ObservationStore(tmp_path / "captures")).start(
        strangers_grid(), initial(), num_rounds=3
    )
    assert as_bytes(wrapped.arrays) == as_bytes(plain.arrays) != as_bytes(initial())
    assert {r: dict(m) for r, m in wrapped.train_metrics_clientapp.items()} == {
        r: dict(m) for r, m in plain.train_metrics_clientapp.items()
    }


def test_a_strangers_update_is_what_was_sent_minus_what_came_back(tmp_path: Path) -> None:
    declaration = ClientDeclaration(model="their.module:Net", lr=0.25, local_steps=1)
    HonestButCurious(FedAvg(), ObservationStore(tmp_path), declaration=declaration).start(
        strangers_grid(), initial(), num_rounds=2
    )
    observations = list(ObservationStore(tmp_path, models=["their.module:Net"]))
    assert [(o.round, o.client) for o in observations] == [
        (r, f"node-{n}") for r in (1, 2) for n in (1, 2, 3)
    ]
    first = observations[0]
    sent = initial()
    torch.testing.assert_close(
        first.parameters["conv.weight"], torch.from_numpy(sent["conv.weight"].numpy())
    )
    torch.testing.assert_close(first.update["conv.weight"], torch.full((2, 1, 3, 3), 0.25))
    torch.testing.assert_close(first.gradient()["conv.weight"], torch.ones(2, 1, 3, 3))
    assert set(first.buffers) == {"bn.running_mean", "bn.num_batches_tracked"}
    assert first.returned_buffers["bn.num_batches_tracked"] == 1
    assert first.declaration.model == "their.module:Net"
    assert first.declaration.num_examples == 10
    assert first.provenance["metrics"]["loss"] == 0.25


def test_only_the_asked_rounds_are_captured(tmp_path: Path) -> None:
    HonestButCurious(FedAvg(), ObservationStore(tmp_path), rounds=[2]).start(
        strangers_grid(), initial(), num_rounds=3
    )
    assert {o.round for o in ObservationStore(tmp_path)} == {2}


def test_the_hook_sees_the_clients_also_inside_another_wrapper(tmp_path: Path) -> None:
    def strategy(inner: Any) -> Any:
        return FixedClipping(inner, noise_multiplier=0.0, clipping_norm=1e9, num_sampled_clients=3)

    inner = HonestButCurious(FedAvg(), ObservationStore(tmp_path))
    wrapped = strategy(inner).start(strangers_grid(), initial(), num_rounds=1)
    plain = strategy(FedAvg()).start(strangers_grid(), initial(), num_rounds=1)
    assert as_bytes(wrapped.arrays) == as_bytes(plain.arrays)
    assert len(list(ObservationStore(tmp_path))) == 3


def test_a_store_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = HonestButCurious(FedAvg(), ObservationStore(blocked / "captures")).start(
        strangers_grid(), initial(), num_rounds=1
    )
    assert "conv.weight" in result.arrays
    assert "was not captured" in caplog.text


def test_evaluation_messages_are_not_captured(tmp_path: Path) -> None:
    strategy = HonestButCurious(FedAvg(fraction_train=0.0), ObservationStore(tmp_path))
    strategy.start(strangers_grid(), initial(), num_rounds=1, train_config=ConfigRecord())
    assert list(ObservationStore(tmp_path)) == []


# What comes from clients.

SENT = {"w": torch.zeros(2)}


def bracts_client(name: Any, said: Any = None, *, examples: Any = 4, update: Any = None) -> Any:
    """An app that replies as bract's own does, with what is laid down here."""
    app = ClientApp()
    declaration = said if isinstance(said, str) else json.dumps(said or {})

    @app.train()
    def train(message: Any, context: Any) -> Any:
        content = RecordDict(
            {
                "update": to_arrays({"w": torch.ones(2)}) if update is None else update,
                "metrics": MetricRecord({"num-examples": examples}),
                "declared": ConfigRecord(
                    {"client": name, "bract-version": "1", "declaration": declaration}
                ),
            }
        )
        return Message(content, reply_to=message)

    return app


def capture(tmp_path: Path, *apps: Any, rounds: Any = 1, declaration: Any = None) -> Any:
    """What is captured of these clients under bract's own FedAvg."""
    hook = HonestButCurious(
        BractFedAvg(min_nodes=len(apps), tolerate_failures=True),
        ObservationStore(tmp_path / "captures"),
        declaration=declaration,
    )
    grid = LoopbackGrid(lambda node: apps[node], [{} for _ in apps])
    hook.start(grid, to_arrays(SENT), num_rounds=rounds, timeout=10)
    return {o.client: o for o in ObservationStore(tmp_path / "captures") if o.round == rounds}


@pytest.mark.parametrize(
    ("declared", "taken", "flagged"), [(None, 0.25, False), (0.25, 0.25, False), (0.0, 0.0, True)]
)
def test_the_proximal_term_is_the_one_that_was_sent_unless_the_operator_declares_it(
    tmp_path: Path, declared: Any, taken: Any, flagged: Any
) -> None:
    declaration = ClientDeclaration(proximal_mu=declared)
    HonestButCurious(
        FedProx(proximal_mu=0.25), ObservationStore(tmp_path), declaration=declaration
    ).start(strangers_grid(), initial(), num_rounds=1)
    for seen in ObservationStore(tmp_path):
        assert seen.declaration.proximal_mu == taken
        flags = " | ".join(seen.provenance["flags"])
        assert (
            "was sent proximal-mu 0.25, the server declares proximal_mu 0.0" in flags
        ) is flagged


def test_without_a_proximal_term_none_is_declared(tmp_path: Path) -> None:
    HonestButCurious(FedAvg(), ObservationStore(tmp_path)).start(
        strangers_grid(), initial(), num_rounds=1
    )
    assert {seen.declaration.proximal_mu for seen in ObservationStore(tmp_path)} == {None}


OWN = ClientDeclaration(model="lenet", lr=0.5, batch_size=8, local_steps=9)


def test_of_a_clients_word_only_its_counts_and_defenses_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {
        "model": "os:abort",
        "lr": 7.0,
        "classes": 3,
        "invented": 1,
        "num_examples": 4,
        "local_steps": 2,
        "batch_size": 2,
        "defenses": [{"name": "pruning", "ratio": 0.5}],
    }
    found = capture(tmp_path, bracts_client("a", said), bracts_client("b"), declaration=OWN)
    declaration = found["a"].declaration
    assert (declaration.model, declaration.lr, declaration.classes) == ("lenet", 0.5, None)
    assert (declaration.num_examples, declaration.local_steps, declaration.batch_size) == (4, 2, 2)
    assert [d["name"] for d in declaration.defenses] == ["pruning"]
    flags = " | ".join(found["a"].provenance["flags"])
    for word in ("model os:abort", "lr 7.0", "classes 3", "'invented'", "defenses pruning"):
        assert word in flags
    assert "a declares model os:abort" in caplog.text
    assert found["b"].provenance["flags"] == ()


@pytest.mark.parametrize(
    "said",
    [
        {"local_steps": 10**12},
        {"batch_size": -1},
        {"batch_size": 10**6},
        {"defenses": [{"name": "unheard-of"}]},
        {"defenses": [{"name": "pruning", "ratio": 7}]},
        {"defenses": [{"name": "precode", "latent": 2**40}]},
        {"defenses": [{"name": "precode", "latent": 16}]},
        {"defenses": "pruning"},
        {"defenses": [{}] * 99},
    ],
)
def test_an_impossible_word_is_flagged_and_the_servers_declaration_stands(
    tmp_path: Path, said: Any
) -> None:
    found = capture(tmp_path, bracts_client("a", said), bracts_client("b"), declaration=OWN)
    declaration = found["a"].declaration
    assert (declaration.local_steps, declaration.batch_size) == (9, 8)
    assert declaration.defenses == ()
    assert len(found["a"].provenance["flags"]) == 1


@pytest.mark.parametrize("name", ["", ".", "..", "../../out", "a/b", "node-1", "x" * 65, "b\n"])
def test_a_name_that_is_a_path_is_filed_under_the_node(tmp_path: Path, name: Any) -> None:
    found = capture(tmp_path, bracts_client("a"), bracts_client(name))
    assert set(found) == {"a", "node-2"}
    assert "filed under node-2" in found["node-2"].provenance["flags"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["captures"]


def test_a_second_client_of_a_name_does_not_replace_the_firsts_capture(tmp_path: Path) -> None:
    twice = to_arrays({"w": torch.full((2,), 9.0)})
    apps = [bracts_client("a"), bracts_client("A", update=twice), bracts_client("a", update=twice)]
    found = capture(tmp_path, *apps, rounds=2)
    assert set(found) == {"a", "node-2", "node-3"}
    assert found["a"].update["w"].tolist() == [1.0, 1.0]


def test_a_client_that_changes_its_name_is_filed_under_the_first(tmp_path: Path) -> None:
    names = iter(["a", "b"])

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        return bracts_client(next(names))(message, context)

    found = capture(tmp_path, app, bracts_client("c"), rounds=2)
    assert set(found) == {"a", "c"}
    assert "has called itself 'a' before" in found["a"].provenance["flags"][0]


@pytest.mark.parametrize(
    "bad",
    [
        bracts_client("bad", "[" * 50_000),
        bracts_client("bad", "[]"),
        bracts_client("bad", examples=float("inf")),
        bracts_client("bad", update=ArrayRecord({"w": Array("f", (2,), "numpy.ndarray", b"")})),
        bracts_client("bad", update=ArrayRecord({"w": Array("f", (2,), "unknown", b"123")})),
        bracts_client("bad", update=to_arrays({"x" * 600: torch.ones(2)})),
    ],
)
def test_a_garbage_reply_costs_one_capture_which_is_listed(tmp_path: Path, bad: Any) -> None:
    found = capture(tmp_path, bad, bracts_client("good"))
    assert set(found) == {"good"}
    (missed,) = read_missed(tmp_path / "captures")
    assert (missed.round, missed.node_id) == (1, "1")


class Broken(ObservationStore):
    def __init__(self, root: Any, error: Any) -> None:
        super().__init__(root)
        self.error = error

    def save(self, observation: Any) -> Path:
        raise self.error


@pytest.mark.parametrize(
    "error", [SafetensorError("I/O error: No space left"), RecursionError("deep"), KeyError("x")]
)
def test_whatever_a_capture_raises_training_goes_on_and_the_missing_are_listed(
    tmp_path: Path, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = FedAvg().start(strangers_grid(), initial(), num_rounds=2)
    hook = HonestButCurious(FedAvg(), Broken(tmp_path, error))
    result = hook.start(strangers_grid(), initial(), num_rounds=2)
    assert as_bytes(result.arrays) == as_bytes(plain.arrays)
    assert [m.round for m in read_missed(tmp_path)] == [1, 1, 1, 2, 2, 2]
    lines = [r for r in caplog.records if "was not captured" in r.getMessage()]
    assert len(lines) == 6
    assert not any("\n" in r.getMessage() or r.exc_info for r in lines)


def test_a_declaration_is_checked_when_the_hook_is_built(tmp_path: Path) -> None:
    given = HonestButCurious(
        FedAvg(), ObservationStore(tmp_path), declaration={"model": "lenet", "lr": 0.1}
    )
    assert given.recorder.declaration == ClientDeclaration(model="lenet", lr=0.1)
    for wrong, words in (
        ({"modle": "lenet"}, ("declaration-wrong", "modle")),
        ({"lr": "fast"}, ("declaration-wrong", "lr", "fast")),
        ("lenet", ("config-value", "str", "ClientDeclaration")),
    ):
        with refused(*words):
            HonestButCurious(FedAvg(), ObservationStore(tmp_path), declaration=wrong)  # type: ignore[arg-type]
    with refused("config-value", "one"):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path), rounds=["one"])  # type: ignore[list-item]


def test_what_a_train_message_tells_the_clients_is_declared(tmp_path: Path) -> None:
    sent = ConfigRecord({"lr": 0.05, "batch-size": 4, "momentum": 2.0, "local-steps": True})
    declared = ClientDeclaration(momentum=0.5)
    for folder, declaration in (("open", None), ("said", declared)):
        strategy = HonestButCurious(
            FedAvg(), ObservationStore(tmp_path / folder), declaration=declaration
        )
        strategy.start(strangers_grid(), initial(), num_rounds=1, train_config=sent)
    first, second = (next(iter(ObservationStore(tmp_path / f))) for f in ("open", "said"))
    assert (first.declaration.lr, first.declaration.batch_size) == (0.05, 4)
    assert first.declaration.local_steps is None  # a truth value is no number of steps
    assert second.declaration.momentum == 0.5  # what the operator declares stands


def test_what_a_function_of_the_round_declares_is_that_rounds(tmp_path: Path) -> None:
    def declared(server_round: int) -> dict[str, Any]:
        return {"lr": 0.1 / server_round, "dropout": 0.5, "augmentation": ("horizontal-flip",)}

    strategy = HonestButCurious(FedAvg(), ObservationStore(tmp_path), declaration=declared)
    strategy.start(strangers_grid(), initial(), num_rounds=2)
    found = {o.round: o.declaration for o in ObservationStore(tmp_path)}
    assert {r: d.lr for r, d in found.items()} == {1: 0.1, 2: 0.05}
    assert found[2].dropout == 0.5 and found[2].augmentation == ("horizontal-flip",)
    with refused("declaration-wrong", "lr", "fast"):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path), declaration=lambda _: {"lr": "fast"})


def test_the_rate_that_each_message_carries_is_that_rounds(tmp_path: Path) -> None:
    class Scheduled(FedAvg):
        def configure_train(self, server_round: int, *given: Any) -> Any:
            messages = list(super().configure_train(server_round, *given))
            for message in messages:
                declared = ConfigRecord({"lr": 0.1 / server_round, "dropout": 0.25})
                message.content["declared"] = declared
            return messages

    HonestButCurious(Scheduled(), ObservationStore(tmp_path)).start(
        strangers_grid(), initial(), num_rounds=2
    )
    found = {o.round: o.declaration for o in ObservationStore(tmp_path)}
    assert {r: (d.lr, d.dropout) for r, d in found.items()} == {1: (0.1, 0.25), 2: (0.05, 0.25)}


def test_the_log_says_where_captures_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr")
    caplog.set_level(logging.INFO, logger="flwr")
    logger.addHandler(handler)
    try:
        HonestButCurious(FedAvg(), ObservationStore(tmp_path / "seen")).start(
            strangers_grid(), initial(), num_rounds=1
        )
    finally:
        logger.removeHandler(handler)
    first, second, *_ = (line for line in said if line.startswith("bract: "))
    assert first == f"bract: {what_is_audited()}" and "image" in first
    assert second == f"bract: captures go to {tmp_path / 'seen'}"


def audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, *, ends: bool = False
) -> list[Any]:
    """Train three rounds beside a process that runs a script; return every process started.

    One that ``ends`` has ended before the next message is sent.
    """
    started: list[Any] = []
    sent = Recorder.sent

    def after_its_end(*arguments: Any) -> Any:
        for process in started if ends else ():
            process.wait(60)
        return sent(*arguments)

    monkeypatch.setattr("bract.server.listening.Recorder.sent", after_its_end)
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(popen([sys.executable, "-c", script], **options))
        return started[-1]

    monkeypatch.setattr("bract.server.live_audit.subprocess.Popen", start)
    hook = HonestButCurious(
        FedAvg(), ObservationStore(tmp_path / "captures"), audit="auto", every=5
    )
    result = hook.start(strangers_grid(), initial(), num_rounds=3)
    assert len(ObservationStore(tmp_path / "captures").folders()) == 9
    assert result.arrays is not None
    return started


@pytest.mark.processes
def test_the_live_audit_is_given_idle_time_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import os, sys, time\n"
        "end = time.monotonic() + 5\n"
        "while os.sched_getscheduler(0) != os.SCHED_IDLE and time.monotonic() < end: pass\n"
        "print(os.sched_getscheduler(0) == os.SCHED_IDLE, os.environ['OMP_NUM_THREADS'],\n"
        "      os.environ['CUDA_VISIBLE_DEVICES'] == '', flush=True)\n"
        "sys.stdin.read()\n"
    )
    # A busy machine leaves little idle time.
    monkeypatch.setattr("bract.server.live_audit.PATIENCE", 120.0)
    (process,) = audited(tmp_path, monkeypatch, script)
    assert process.returncode == 0
    assert (tmp_path / "live-audit.log").read_text() == "True 1 True\n"


@pytest.mark.processes
def test_a_live_audit_that_crashes_is_told_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = audited(tmp_path, monkeypatch, "raise SystemExit(9)", ends=True)
    assert len(started) == 1
    reported = [r.message for r in caplog.records if "live audit" in r.message]
    assert (
        len(reported) == 1 and "training goes on" in reported[0] and "ended with 9" in reported[0]
    )


@pytest.mark.processes
def test_a_live_audit_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.server.live_audit.PATIENCE", 0.5)
    (process,) = audited(tmp_path, monkeypatch, "import time; time.sleep(60)")
    assert process.returncode == -signal.SIGKILL


def test_a_live_audit_that_cannot_start_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.server.live_audit.sys.executable", str(tmp_path / "no-python"))
    hook = HonestButCurious(FedAvg(), ObservationStore(tmp_path / "captures"), audit="auto")
    assert hook.start(strangers_grid(), initial(), num_rounds=1).arrays is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"audit": 3}, ("config-value", "audit", "3")),
        ({"audit": []}, ("config-value", "audit")),
        ({"audit": "auto", "every": 0}, ("config-value", "every", "0")),
        ({"audit": "auto", "every": True}, ("config-value", "every")),
    ],
)
def test_a_live_audit_of_nothing_is_refused_before_training(
    tmp_path: Path, options: Any, said: tuple[str, ...]
) -> None:
    with refused(*said):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path / "captures"), **options)
    with refused("config-value", "captures"):
        HonestButCurious(FedAvg(), ObservationStore(tmp_path / "elsewhere"), audit="auto")


@pytest.mark.parametrize(
    "ends", [SystemExit(3), GeneratorExit(), BaseExceptionGroup("", [OSError()])]
)
def test_code_around_a_strategy_that_would_end_the_process_costs_the_capture_alone(
    ends: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def declared(number: int) -> Any:
        asked.append(number)
        if len(asked) > 1:  # the first time the hook is made
            raise ends
        return {}

    plain = FedAvg().start(strangers_grid(), initial(), num_rounds=1)
    hook = HonestButCurious(FedAvg(), ObservationStore(tmp_path / "captures"), declaration=declared)
    wrapped = hook.start(strangers_grid(), initial(), num_rounds=1)
    assert as_bytes(wrapped.arrays) == as_bytes(plain.arrays)
    assert type(ends).__name__ in caplog.text
