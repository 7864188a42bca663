from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedProx as FlowerFedProx
from flwr.serverapp.strategy import Result
from refusals import refused
from toy_clients import toy_app, toy_arrays, toy_grid, value_of

from bract.protocol.records import Failure, from_arrays, to_arrays, write_reply
from bract.strategies import Encrypted, FedAvg, FedProx


def play(
    app: Any,
    clients: Any,
    *,
    strategy: Any = None,
    faults: Any = None,
    start: Any = 0.0,
    **options: Any,
) -> Any:
    strategy = strategy or FedAvg(min_nodes=clients, **options)
    grid = toy_grid(app, clients, faults=faults)
    result = strategy.start(grid, toy_arrays(start), num_rounds=1, timeout=10)
    return strategy, grid, value_of(result.arrays)


def test_replies_with_local_weights_average_as_under_flowers_own_fedavg() -> None:
    app = toy_app((1.0, 5.0), examples=[30, 10])
    flower = FlowerFedAvg(fraction_evaluate=0.0, min_train_nodes=2)
    grid = toy_grid(app, 2)
    expected = value_of(flower.start(grid, toy_arrays(10.0), num_rounds=1).arrays)
    _, _, w = play(app, 2, start=10.0)
    assert w == pytest.approx(8.0)
    assert w == pytest.approx(expected)


def test_uniform_weights_and_a_server_learning_rate() -> None:
    _, _, w = play(
        toy_app((1.0, 5.0), examples=[30, 10]), 2, weighting="uniform", server_lr=0.5, start=10.0
    )
    assert w == pytest.approx(8.5)


def test_a_client_that_drops_out_costs_its_own_contribution_only() -> None:
    strategy, _, w = play(
        toy_app((1.0, 5.0, 100.0), examples=[30, 10, 60]),
        3,
        faults=lambda m: "gone" if m.metadata.dst_node_id == 3 else None,
        tolerate_failures=True,
    )
    assert w == pytest.approx(-2.0)
    assert strategy.outcome.weights == pytest.approx((0.75, 0.25))
    assert [f.reason for f in strategy.outcome.failures] == ["gone"]


def test_a_failure_is_of_the_registered_name_or_names_the_clients_that_answered() -> None:
    strategy = FedAvg(min_nodes=2)
    strategy.names.claim(1, "client-0")
    strategy.names.claim(3, "client-2")
    unnamed = strategy.failure(2, "gone")
    assert unnamed.client == "node-2"
    assert unnamed.reason == "gone; it never answered in this run, as client-0, client-2 did"
    nodes = [SimpleNamespace(node_id=1, name="x"), SimpleNamespace(node_id=2, name="hospital-b")]
    assert strategy._present(cast(Grid, SimpleNamespace(get_nodes=lambda: nodes))) == [
        "client-0",
        "hospital-b",
    ]
    assert strategy.failure(2, "gone") == Failure(2, "hospital-b", "gone")
    assert strategy.failure(1, "gone").client == "client-0"


def test_a_registered_name_is_of_no_other_node_though_it_claim_it_first() -> None:
    strategy = FedAvg(min_nodes=2)
    nodes = [SimpleNamespace(node_id=1, name="a"), SimpleNamespace(node_id=2, name="Hospital-B")]
    strategy._present(cast(Grid, SimpleNamespace(get_nodes=lambda: nodes)))
    with refused("identity-refused", "hospital-b", 2):
        strategy.names.claim(1, "hospital-b")
    assert not strategy.names.claimed(1, "hospital-b")
    assert strategy.names.claim(2, "hospital-b") == "hospital-b"
    assert strategy.names.claim(1, "c") == "c"


def test_who_is_gone_for_good_is_not_waited_for_where_failures_are_tolerated() -> None:
    def unplugged(message: Any) -> Any:
        if message.metadata.dst_node_id != 3:
            return None
        del grid.contexts[3]
        return "gone"

    strategy = FedAvg(min_nodes=3, tolerate_failures=True)
    grid = toy_grid(toy_app((1.0, 5.0, 100.0), examples=[30, 10, 60]), 3, faults=unplugged)
    result = strategy.start(grid, toy_arrays(0.0), num_rounds=2, timeout=10)
    assert value_of(result.arrays) == pytest.approx(-4.0)
    assert [m.metadata.dst_node_id for m in grid.log].count(3) == 1


@pytest.mark.parametrize("examples", [0, -5])
def test_a_reply_that_claims_no_examples_is_a_failure_of_its_client(examples: Any) -> None:
    def app(node: Any) -> Any:
        made = ClientApp()

        @made.train()
        def train(message: Any, context: Any) -> Any:
            return write_reply(
                client=f"client-{node}",
                version="1",
                update={"w": torch.tensor([1.0], dtype=torch.float64)},
                buffers={},
                num_examples=examples if node else 7,
                metrics={},
                declaration={},
                reply_to=message,
            )

        return made

    strategy, _, w = play(app, 2, tolerate_failures=True)
    assert w == pytest.approx(-1.0)
    assert f"found {examples}" in strategy.outcome.failures[0].reason


def test_a_fraction_of_the_nodes_trains() -> None:
    _, grid, _ = play(toy_app([1.0] * 4), 4, fraction=0.5)
    assert len(grid.log) == 2


def stranger(arrays: Any, metrics: Any = None) -> Any:
    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        record = RecordDict({"arrays": to_arrays(arrays)})
        record["metrics"] = MetricRecord(metrics or {"num-examples": 1})
        return Message(record, reply_to=message)

    return app


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (stranger({"v": torch.zeros(1)}), ("run-failed",)),
        (stranger({"w": torch.zeros(2)}), ("run-failed",)),
        (stranger({"w": torch.zeros(1)}, {"count": 3}), ("run-failed",)),
        (stranger({"w": torch.tensor([float("nan")])}), ("run-failed", "NaN")),
    ],
)
def test_an_unusable_reply_is_a_failure_of_its_client(app: Any, words: tuple[str, ...]) -> None:
    good = toy_app([1.0, 1.0])

    def make(node: Any) -> Any:
        return app if node == 1 else good(node)

    with refused(*words):
        play(make, 2)
    strategy, _, w = play(make, 2, tolerate_failures=True)
    assert w == pytest.approx(-1.0)
    assert [f.node_id for f in strategy.outcome.failures] == [2]


def test_buffers_of_a_strangers_model_are_averaged_not_treated_as_updates() -> None:
    sent = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    returned = {"w": torch.tensor([-2.0]), "bn.running_mean": torch.tensor([8.0])}
    strategy = FedAvg(min_nodes=1, server_lr=0.5)
    result = strategy.start(toy_grid(stranger(returned), 1), to_arrays(sent), num_rounds=1)
    arrays = from_arrays(result.arrays)
    assert arrays["w"].item() == pytest.approx(-1.0)
    assert arrays["bn.running_mean"].item() == pytest.approx(8.0)


def test_fedprox_announces_mu_under_flowers_key_and_averages_like_fedavg() -> None:
    strategy = FedProx(proximal_mu=0.25, min_nodes=2)
    _, grid, w = play(toy_app((1.0, 3.0)), 2, strategy=strategy)
    assert grid.log[0].content.config_records["config"]["proximal-mu"] == 0.25
    assert w == pytest.approx(-2.0)


def test_fedprox_ends_where_flowers_own_ends() -> None:
    app = toy_app((1.0, 5.0), examples=[30, 10])
    flower = FlowerFedProx(fraction_evaluate=0.0, min_train_nodes=2, proximal_mu=0.25)
    grid = toy_grid(app, 2)
    expected = value_of(flower.start(grid, toy_arrays(10.0), num_rounds=1).arrays)
    _, own, w = play(app, 2, strategy=FedProx(proximal_mu=0.25, min_nodes=2), start=10.0)
    assert w == pytest.approx(expected)
    sent = [dict(g.log[0].content.config_records["config"]) for g in (grid, own)]
    assert sent[1] == {**sent[0], "bract-packing": True}


def test_fedprox_refuses_a_negative_mu() -> None:
    with refused("config-value", "proximal_mu"):
        FedProx(proximal_mu=-1.0)


def test_a_clients_error_is_told_in_its_own_words_and_name() -> None:
    reason = "<class 'bract.errors.BractError'>:<'client-1: no such device'>"
    failure = FedAvg().failure(77, reason)
    assert (failure.client, failure.reason) == ("client-1", "no such device")
    assert FedAvg().failure(77, "<class 'KeyError'>:<'x'>").client == "node-77"


def test_a_round_that_is_summed_holds_no_answer_any_longer() -> None:
    class Looking(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            assert all(message.content.array_records for message in replies)
            found = super().aggregate_train(server_round, replies)
            assert not any(message.content.array_records for message in replies)
            assert all(message.content.metric_records for message in replies)
            return found

    strategy, _, w = play(toy_app((1.0, 5.0)), 2, strategy=Looking(min_nodes=2))
    assert w == pytest.approx(-3.0)
    assert [(c.update, c.buffers) for c in strategy.outcome.contributions] == [({}, {})] * 2


@pytest.mark.parametrize("encrypts", [False, True])
def test_options_of_a_newer_flower_are_handed_on(
    encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def start(*_: Any, **options: Any) -> Result:
        given.update(options)
        return Result()

    own = Encrypted(FlowerFedAvg(), clients=3) if encrypts else FedAvg(min_nodes=1)
    monkeypatch.setattr(FedAvg if encrypts else FlowerFedAvg, "start", start)
    stop = [True].copy
    own.start(toy_grid(toy_app((1.0,)), 1), toy_arrays(0.0), num_rounds=1, should_stop=stop)
    assert given == {"should_stop": stop}
