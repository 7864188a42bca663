"""A round closes at a quorum and a grace, or at its deadline; late answers are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from encrypted_runs import small, small_grid, train
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from refusals import refused
from safetensors.torch import load_file
from toy_clients import by_row, toy_app, toy_arrays, value_of

from bract import ObservationStore
from bract.config import build_config
from bract.paillier.sharing import KeyShare
from bract.protocol.fused import FUSED_TYPE
from bract.protocol.keyexchange import HELLO
from bract.protocol.records import write_reply
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid
from bract.strategies import FedAvg, FedBoosting, closing, polling, waiting
from bract.strategies.closing import Closing
from bract.strategies.registry import create_strategy


class SlowGrid(LoopbackGrid):
    """Answers of ``delays[kind, node, n]`` arrive that many seconds after the n-th such message."""

    def __init__(self, *arguments: Any, delays: Any, clock: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._delays, self._clock = dict(delays), clock
        self._due: dict[str, float] = {}
        self._seen: dict[Any, int] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for message in messages:
            key = (message.metadata.message_type, message.metadata.dst_node_id)
            self._seen[key] = self._seen.get(key, 0) + 1
            delay = self._delays.get((*key, self._seen[key]), 0.0)
            self._due[message.metadata.message_id] = self._clock.monotonic() + delay
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now = self._clock.monotonic()
        return super().pull_messages([i for i in message_ids if self._due[i] <= now])

    def get_nodes(self) -> Any:
        return [SimpleNamespace(node_id=node, name="") for node in self.contexts]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return polling.collect(self, self.push_messages(messages), timeout=timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that only sleeping moves."""
    slept: list[float] = [0.0]
    fake = SimpleNamespace(
        monotonic=lambda: sum(slept),
        monotonic_ns=lambda: int(sum(slept) * 1e9),
        sleep=slept.append,
    )
    for module in (closing, polling, waiting):
        monkeypatch.setattr(module, "time", fake)
    return fake


def play(
    clock: Any,
    delays: Any,
    *,
    rounds: int = 1,
    clients: int = 3,
    strategy: FedAvg | None = None,
    app: Any = None,
    timeout: float = 60,
    grid_options: Any = None,
    **options: Any,
) -> Any:
    grid = SlowGrid(
        app or toy_app((1.0, 5.0, 100.0)),
        [{} for _ in range(clients)],
        delays=delays,
        clock=clock,
        **(grid_options or {}),
    )
    options = {"tolerate_failures": True, "min_nodes": clients, "quorum": 2, "grace": 3.0} | options
    strategy = strategy or FedAvg(**options)
    rows: list[Any] = []
    result = strategy.start(
        grid,
        toy_arrays(0.0),
        num_rounds=rounds,
        timeout=timeout,
        evaluate_fn=lambda number, _: rows.append(strategy.outcome) if number else None,
    )
    return rows, value_of(result.arrays), grid


def asked(grid: Any) -> list[int]:
    return [m.metadata.dst_node_id for m in grid.log]


def test_a_round_closes_once_a_quorum_has_answered_and_the_grace_has_passed(clock: Any) -> None:
    rows, w, _ = play(clock, {("train", 3, 1): 50.0})
    assert w == pytest.approx(-3.0)
    assert 3.0 <= clock.monotonic() < 4.0
    (failure,) = rows[0].failures
    assert failure.node_id == 3
    assert failure.reason == (
        "no answer when the round closed: 2 of 3 had answered (strategy.quorum 2, 3 s of grace)"
    )


def test_who_answers_within_the_grace_is_part_of_the_round(clock: Any) -> None:
    rows, w, _ = play(clock, {("train", 3, 1): 2.5})
    assert w == pytest.approx(-106.0 / 3)
    assert not rows[0].failures


def test_an_error_is_no_answer_of_a_quorum(clock: Any) -> None:
    gone = {"faults": lambda m: "gone" if m.metadata.dst_node_id == 1 else None}
    rows, w, _ = play(clock, {("train", 3, 1): 20.0}, grid_options=gone)
    assert w == pytest.approx(-52.5)
    assert [f.node_id for f in rows[0].failures] == [1]


def test_a_round_without_a_quorum_closes_at_its_deadline(clock: Any) -> None:
    late = {("train", 2, 1): 90.0, ("train", 3, 1): 90.0}
    rows, w, _ = play(clock, late, timeout=10)
    assert w == pytest.approx(-1.0)
    assert 10.0 <= clock.monotonic() < 11.0
    assert {f.reason for f in rows[0].failures} == {"no answer in time"}


def test_a_late_update_is_refused_by_name_and_enters_no_later_round(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rows, w, grid = play(
            clock, {("train", 3, 1): 4.0, ("train", 2, 2): 2.0}, rounds=3, quorum=1
        )
    # Node 3 is asked nothing while it works on round 1, and takes part again after that.
    assert [sorted(asked(grid)[i:j]) for i, j in ((0, 3), (3, 5), (5, 8))] == [
        [1, 2, 3],
        [1, 2],
        [1, 2, 3],
    ]
    assert [[c.node_id for c in row.contributions] for row in rows] == [[1, 2], [1, 2], [1, 2, 3]]
    assert [[(late.node_id, late.server_round) for late in row.late] for row in rows] == [
        [],
        [(3, 1)],
        [],
    ]
    assert rows[1].late[0].reason == "its update of round 1 came after that had closed"
    assert "round 2: node-3: its update of round 1 came after that had closed; refused" in (
        caplog.text
    )
    assert w == pytest.approx(-3.0 - 3.0 - 106.0 / 3)


def test_a_late_update_is_refused_by_name_where_only_the_deadline_closes_a_round(
    clock: Any,
) -> None:
    rows, w, _ = play(clock, {("train", 3, 1): 15.0}, rounds=2, timeout=10, quorum=None)
    assert [[c.node_id for c in row.contributions] for row in rows] == [[1, 2], [1, 2, 3]]
    assert [(late.node_id, late.server_round) for late in rows[1].late] in ([], [(3, 1)])
    assert w == pytest.approx(-3.0 - 106.0 / 3)


def test_a_round_begins_once_a_quorum_is_idle(clock: Any) -> None:
    late = {("train", 2, 1): 4.0, ("train", 3, 1): 20.0}
    rows, _, _ = play(clock, late, rounds=2, quorum=0.6, grace=0.0)
    assert [[c.node_id for c in row.contributions] for row in rows] == [[1, 2], [1, 2]]
    late = {("train", n, 1): 5.0 for n in (2, 3)}
    rows, _, _ = play(clock, late, rounds=2, quorum=2, grace=0.0, timeout=4)
    assert [c.node_id for c in rows[0].contributions] == [1]
    assert len(rows[1].contributions) >= 2


def test_a_share_is_of_the_clients_that_a_round_asks_usually(clock: Any) -> None:
    # Of five, 0.6 are three. Round 2 asks the three that are idle: 0.6 of these would be two.
    delays = {("train", 4, 1): 1e9, ("train", 5, 1): 1e9, ("train", 3, 2): 20.0}
    rows, _, grid = play(
        clock,
        delays,
        rounds=2,
        clients=5,
        quorum=0.6,
        grace=0.0,
        app=toy_app((1.0, 2.0, 3.0, 4.0, 5.0)),
    )
    assert sorted(asked(grid)[5:]) == [1, 2, 3]
    assert [[c.node_id for c in row.contributions] for row in rows] == [[1, 2, 3]] * 2


def test_a_share_of_more_clients_than_usual_is_of_those_asked() -> None:
    closing = Closing(0.5)
    closing.usual = 4
    assert [closing.needed(n) for n in (1, 2, 3, 4, 8)] == [1, 2, 2, 2, 4]


def test_a_validation_asks_the_quorum_and_takes_no_share_of_it(clock: Any) -> None:
    strategy = FedBoosting(min_nodes=5, tolerate_failures=True)
    strategy.closing = Closing(0.6, 0.0)
    delays = {("train", 4, 1): 1e9, ("train", 5, 1): 1e9, ("evaluate.fused", 3, 1): 20.0}
    rows, _, _ = play(
        clock,
        delays,
        clients=5,
        strategy=strategy,
        app=toy_app((1.0, 2.0, 3.0, 4.0, 5.0), by_row([[0.5] * 5] * 3)),
    )
    assert [f.node_id for f in rows[0].failures] == [4, 5]


def test_an_answer_that_is_no_update_is_no_answer_of_a_quorum(clock: Any) -> None:
    useless = ClientApp()

    @useless.train()
    def train_nothing(message: Message, context: Any) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    others = toy_app((1.0, 5.0, 100.0))
    rows, w, _ = play(
        clock,
        {("train", 3, 1): 20.0},
        app=lambda node: useless if node == 0 else others(node),
    )
    assert w == pytest.approx(-52.5)
    assert [f.node_id for f in rows[0].failures] == [1]


def test_useless_answers_are_not_said_to_have_come(clock: Any) -> None:
    grid = SlowGrid(toy_app((1.0,) * 3), [{}] * 3, delays={("train", 3, 1): 50.0}, clock=clock)
    closing = Closing(1, 0.0)
    closing.counts = lambda kind, reply: reply.metadata.src_node_id == 1
    closing.phase(grid, (messages := train_messages(1, 2, 3)), 60)
    assert "1 of 3 had answered" in closing.why(messages[2].metadata.message_id)


def train_messages(*nodes: int) -> list[Message]:
    return [Message(RecordDict({"arrays": toy_arrays()}), n, "train") for n in nodes]


def replied(content: RecordDict) -> Message:
    return Message(content, reply_to=train_messages(1)[0])


def test_the_form_of_an_answer_is_its_strategys(two_of_three: list[KeyShare]) -> None:
    SlowGrid(toy_app((1.0,)), [{}], delays={}, clock=None)  # messages need a run
    weights, examples = toy_arrays(), MetricRecord({"num-examples": 1})
    own: dict[str, Any] = {"client": "a", "version": "1", "num_examples": 1, "buffers": {}}
    own |= {"metrics": {}, "declaration": {}, "reply_to": train_messages(1)[0]}
    nothing = replied(RecordDict())
    stranger = replied(RecordDict({"arrays": weights, "metrics": examples}))
    uncounted = replied(RecordDict({"arrays": weights}))
    empty = write_reply(update={}, **own)
    encrypted = write_reply(update={}, ciphertexts=weights, **own)
    hello = replied(RecordDict({**encrypted.content, HELLO: MetricRecord({"x": 1})}))
    scores = replied(RecordDict({"metrics": MetricRecord({"accuracy": [0.5]})}))
    every = (nothing, stranger, uncounted, empty, encrypted, hello, scores)

    def counted(kind: str = "train", **changes: Any) -> list[Message]:
        strategy = create_strategy(small(**changes))
        return [m for m in every if strategy.counts(kind, m)]

    assert counted() == [stranger]
    assert counted(encryption={"scheme": "paillier"}) == [encrypted]
    assert encrypted in counted(encryption={"scheme": "masks"})
    assert stranger not in counted(encryption={"scheme": "masks"})
    boosting = {"name": "fedboosting"}
    assert counted(strategy=boosting, data=VALIDATED) == [stranger]
    assert counted(FUSED_TYPE, strategy=boosting, data=VALIDATED) == [scores]


VALIDATED = {"image_size": 8, "validation": 0.2}


def test_reasons_of_all_phases_of_a_round_are_kept(clock: Any) -> None:
    delays = {("train", 2, n): 50.0 for n in (1, 2)}
    grid = SlowGrid(toy_app((1.0,) * 3), [{}] * 3, delays=delays, clock=clock)
    closing = Closing(1, 0.0)
    closing.server_round = 1
    first, second = train_messages(1, 2), train_messages(3)
    for messages in (first, second):  # an encrypted round asks again who could not follow
        closing.phase(grid, messages, 60)
    late = first[1].metadata.message_id
    assert closing.why(late).startswith("no answer when the round closed")
    closing.server_round = 2
    assert closing.why(late) == "no answer in time"


@pytest.mark.parametrize("scheme", ["paillier", "masks"])
def test_who_has_answered_meanwhile_is_idle(clock: Any, scheme: str) -> None:
    grid = SlowGrid(toy_app((1.0,) * 3), [{}] * 3, delays={("train", 3, 1): 9.0}, clock=clock)
    strategy: Any = create_strategy(small(encryption={"scheme": scheme}))
    strategy.closing = closing = Closing(2, 0.0)
    strategy._transport.grid = closing.over(grid)
    closing.phase(grid, train_messages(1, 2, 3), 60)
    assert strategy._transport.idle() == {1, 2}
    clock.sleep(10.0)
    assert strategy._transport.idle() == {1, 2, 3}


@pytest.mark.parametrize("client", [2, 3])
def test_whose_capture_is_missed_is_told_once_the_round_has_closed(
    clock: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, client: int
) -> None:
    delays = {("train", 2, 1): 1.0, ("train", 3, 1): 50.0}
    grid = SlowGrid(toy_app((1.0,) * 3), [{}] * 3, delays=delays, clock=clock)
    strategy = FedAvg(min_nodes=3, tolerate_failures=True, quorum=2, grace=0.0)
    capture = {"clients": [f"node-{client}"]}
    HonestButCurious(strategy, ObservationStore(tmp_path), capture=capture).start(
        grid, toy_arrays(), num_rounds=2, timeout=60
    )
    said = [r.getMessage() for r in caplog.records if "has replied yet" in r.getMessage()]
    assert said == (
        ["capture.clients: no node-3 has replied yet; replied have node-1, node-2"]
        if client == 3
        else []
    )


def test_a_quorum_without_tolerance_is_refused(clock: Any) -> None:
    with refused("config-conflict", "tolerate_failures"):
        play(clock, {}, tolerate_failures=False)


def test_a_client_that_never_answers_is_asked_again_after_a_timeout(clock: Any) -> None:
    delays = {("train", 3, 1): 1e9, **{("train", 2, n): 2.0 for n in range(1, 20)}}
    rows, _, grid = play(clock, delays, rounds=16, timeout=20)
    assert asked(grid).count(3) >= 2
    assert {c.node_id for c in rows[-1].contributions} == {1, 2, 3}


def test_a_late_validator_costs_its_column(clock: Any) -> None:
    validate = by_row([[0.9, 0.9, 0.1], [0.1, 0.1, 0.9], [0.1, 0.1, 0.9]])
    strategy = FedBoosting(min_nodes=3, tolerate_failures=True)
    strategy.closing = Closing(2, 3.0)
    rows, _, _ = play(
        clock,
        {("evaluate.fused", 3, 1): 30.0},
        strategy=strategy,
        app=toy_app((1.0, 2.0, 3.0), validate),
    )
    (row,) = rows
    assert len(row.contributions) == 3
    assert row.weights[0] == max(row.weights)
    assert [f.reason.split(":")[0] for f in row.failures] == ["validation"]


@pytest.mark.parametrize("quorum", [0, -1, 1.5, 0.0, float("nan"), True])
def test_a_quorum_out_of_range_is_refused(quorum: Any) -> None:
    with refused("config-value", "quorum"):
        Closing(quorum)
    with refused("config-value", "grace"):
        Closing(1, float("inf"))


def test_a_share_is_rounded_up_but_for_the_error_of_a_float() -> None:
    assert [Closing(0.8).needed(n) for n in (1, 2, 3, 5, 10)] == [1, 2, 3, 4, 8]
    assert Closing(0.1).needed(30) == 3
    assert (Closing(4).needed(3), Closing(None).needed(3), Closing(1.0).needed(3)) == (3, 3, 3)


TOLERANT = {"tolerate_failures": True}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"strategy": {"quorum": 0.8}}, "strategy.tolerate_failures is false; set it to true"),
        ({"strategy": TOLERANT | {"quorum": 4}}, "4, but a round asks 3 clients; lower it"),
        ({"strategy": TOLERANT | {"quorum": 1.2}}, "strategy.quorum: found 1.2"),
        ({"strategy": TOLERANT | {"grace": -1}}, "strategy.grace: found -1"),
        (
            {
                "strategy": TOLERANT | {"quorum": 2},
                "encryption": {"scheme": "paillier", "threshold": 3},
            },
            "needs 3 clients to decrypt, and late ones cannot help; raise the quorum to 3",
        ),
        (
            {"clients": 6, "strategy": TOLERANT | {"quorum": 3}, "encryption": "masks"},
            "quorum is 3, 3 of 6: a masked sum of 6 needs 4 clients to unmask it",
        ),
        (
            {"clients": 3, "strategy": TOLERANT | {"quorum": 2}, "encryption": "masks"},
            "3 to hide each of them; raise the quorum to 3 or more",
        ),
        (
            {
                "clients": 60,
                "strategy": TOLERANT | {"quorum": 0.5},
                "encryption": {"scheme": "masks", "neighbours": 10, "max_weight_sum": 500},
            },
            "a masked sum is lost with a probability of up to 1",
        ),
    ],
)
def test_a_quorum_that_cannot_work_is_refused_in_one_line(content: Any, words: str) -> None:
    with refused("config-value") as caught:
        build_config(content)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def slow(folder: Path, clock: Any, delays: Any, keys: Any = (), **changes: Any) -> Any:
    config = small(**changes)
    grid = small_grid(folder, config, keys, kind=SlowGrid, delays=delays, clock=clock)
    return train(folder, config, grid), grid


def test_metrics_name_client_and_round_of_a_late_update(tmp_path: Path, clock: Any) -> None:
    run, _ = slow(
        tmp_path,
        clock,
        {("train", 3, 1): 8.0, ("train", 2, 2): 4.5},
        rounds=2,
        strategy=TOLERANT | {"quorum": 1},
    )
    rows = run.metrics()
    assert set(rows[1].clients) == {"client-0", "client-1"}
    assert [f.client for f in rows[1].failures] == ["node-3"]
    (late,) = rows[2].late
    assert (late.client, late.round) == ("node-3", 1)
    assert {o.client for o in ObservationStore(run.captures) if o.round == 2} == {
        "client-0",
        "client-1",
    }


@pytest.mark.usefixtures("public_order")
def test_a_masked_sum_goes_on_without_a_late_client(tmp_path: Path, clock: Any) -> None:
    changes: dict[str, Any] = {
        "clients": 4,
        "data": {
            "image_size": 8,
            "validation": 0.0,
            "partition": {"kind": "sizes", "sizes": [10, 10, 10, 10]},
        },
        "rounds": 2,
        "strategy": TOLERANT | {"quorum": 3, "grace": 1},
    }
    delays = {("train", 4, 1): 50.0}
    plain, _ = slow(tmp_path / "plain", clock, delays, **changes)
    changes["encryption"] = {"scheme": "masks", "clip": 0.5}
    masked, grid = slow(tmp_path / "masked", clock, delays, **changes)
    assert [sorted(row.clients) for row in masked.metrics()[1:]] == [
        ["client-0", "client-1", "client-2"]
    ] * 2
    final = [load_file(run.models / "final.safetensors") for run in (plain, masked)]
    assert max(float((final[0][n] - final[1][n]).abs().max()) for n in final[0]) < 1e-4
    kinds = [m.metadata.message_type for m in grid.log if m.metadata.dst_node_id == 4]
    assert kinds == ["query.advertise", "query.share", "query.open", "train"]


def test_a_threshold_is_met_by_the_clients_in_time(
    tmp_path: Path, clock: Any, two_of_three: list[KeyShare]
) -> None:
    run, grid = slow(
        tmp_path,
        clock,
        {("train", 3, 1): 8.0},
        two_of_three,
        rounds=2,
        encryption={"scheme": "paillier", "threshold": 2, "clip": 0.5},
        strategy=TOLERANT | {"quorum": 2, "grace": 1},
    )
    assert sorted(run.metrics()[1].clients) == ["client-0", "client-1"]
    helped = [
        m.metadata.dst_node_id for m in grid.log if m.metadata.message_type == "query.partial"
    ]
    assert helped[:2] == [1, 2]
    assert run.metrics()[-1].evaluation is not None


def test_a_share_leaves_as_many_clients_as_decrypt(
    tmp_path: Path, clock: Any, two_of_three: list[KeyShare]
) -> None:
    # Half of the two that round 2 asks would be one, and no second one would be idle.
    run, _ = slow(
        tmp_path,
        clock,
        {("train", 3, 1): 1e9, ("train", 2, 2): 20.0},
        two_of_three,
        rounds=2,
        encryption={"scheme": "paillier", "threshold": 2, "clip": 0.5},
        strategy=TOLERANT | {"quorum": 0.5, "grace": 0},
    )
    assert [sorted(row.clients) for row in run.metrics()[1:3]] == [["client-0", "client-1"]] * 2
    assert run.metrics()[-1].evaluation is not None


class LosingGrid(SlowGrid):
    """Node 2 leaves once it has trained."""

    def get_node_ids(self) -> Iterable[int]:
        return [n for n in super().get_node_ids() if n != 2 or ("train", 2) not in self._seen]


def test_who_is_late_is_asked_to_decrypt_where_the_others_are_too_few(
    tmp_path: Path, clock: Any, two_of_three: list[KeyShare]
) -> None:
    config = small(
        encryption={"scheme": "paillier", "threshold": 2, "clip": 0.5},
        strategy=TOLERANT | {"quorum": 2, "grace": 0},
    )
    grid = small_grid(
        tmp_path,
        config,
        two_of_three,
        kind=LosingGrid,
        delays={("train", 3, 1): 1e9},
        clock=clock,
    )
    run = train(tmp_path, config, grid)
    helped = [
        m.metadata.dst_node_id for m in grid.log if m.metadata.message_type == "query.partial"
    ]
    assert helped == [1, 3]
    assert run.metrics()[-1].evaluation is not None
