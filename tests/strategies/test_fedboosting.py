import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from refusals import refused
from toy_clients import by_row, toy_app, toy_arrays, toy_grid, value_of

from bract import ObservationStore
from bract.errors import BractError
from bract.server import HonestButCurious
from bract.strategies import FedBoosting

LN2 = math.log(2.0)
NAN = math.nan
# softmax(T) = 1/3 each, sums of V 3 ln 2, 0, 0: the weights are 1/2, 1/4, 1/4
V = [[LN2] * 3, [0.0] * 3, [0.0] * 3]
UPDATES = (1.0, 2.0, 6.0)


def play(
    app: Any,
    clients: Any = 3,
    *,
    rounds: Any = 1,
    faults: Any = None,
    start: Any = 0.0,
    **options: Any,
) -> Any:
    strategy = FedBoosting(min_nodes=clients, **options)
    grid = toy_grid(app, clients, faults=faults)
    result = strategy.start(grid, toy_arrays(start), num_rounds=rounds, timeout=10)
    return strategy, grid, value_of(result.arrays)


def fault(node: Any, phase: Any, reason: Any = "gone") -> Any:
    def check(message: Any) -> Any:
        hit = message.metadata.dst_node_id == node
        return reason if hit and message.metadata.message_type == phase else None

    return check


def test_one_round_on_known_scores_gives_the_model_worked_by_hand() -> None:
    # 0.5 * 1 + 0.25 * 2 + 0.25 * 6 = 2.5
    strategy, _, w = play(toy_app(UPDATES, by_row(V)), start=10.0)
    assert w == pytest.approx(7.5)
    assert strategy.outcome.weights == pytest.approx((0.5, 0.25, 0.25))
    assert strategy.outcome.boosting.validation.tolist() == V
    assert strategy.outcome.boosting.training.tolist() == [0.5, 0.5, 0.5]
    assert strategy.outcome.boosting.clients == ("node-1", "node-2", "node-3")


def test_without_training_scores_none_is_asked_for_and_weights_follow_the_validation() -> None:
    # Means of V ln 2, 0, 0 whatever T is: weights 1/2, 1/4, 1/4.
    app = toy_app(UPDATES, by_row(V), training=(0.1, 0.9, 0.1))
    strategy, grid, w = play(app, start=10.0, training_scores=False)
    assert w == pytest.approx(7.5)
    assert strategy.outcome.weights == pytest.approx((0.5, 0.25, 0.25))
    assert np.isnan(strategy.outcome.boosting.training).all()
    asked = [m.content["config"] for m in grid.log if m.metadata.message_type == "train"]
    assert [config["training-score"] for config in asked] == [False] * 3
    assert play(app, start=10.0)[0].outcome.weights[0] < 0.45


def test_every_client_scores_every_fused_model_in_one_message() -> None:
    seen = {}

    def validate(client: Any, models: Any) -> Any:
        seen[client] = models
        return {"accuracy": [0.5] * len(models)}

    _, grid, _ = play(toy_app(UPDATES, validate), start=10.0)
    assert set(seen) == {0, 1, 2}
    for models in seen.values():
        assert models == pytest.approx([8.7, 7.85, 4.45])
    types = [m.metadata.message_type for m in grid.log]
    assert types == ["train"] * 3 + ["evaluate.fused"] * 3


def test_all_clients_are_sent_the_same_records_so_that_they_travel_once() -> None:
    _, grid, _ = play(toy_app(UPDATES, by_row(V)))
    contents = [m.content for m in grid.log if m.metadata.message_type == "evaluate.fused"]
    assert len({id(content) for content in contents}) == 1
    assert len({content.object_id for content in contents}) == 1


def test_fused_models_take_the_server_learning_rate() -> None:
    seen: list[Any] = []

    def validate(client: int, models: Sequence[float]) -> dict[str, object]:
        seen.extend(models)
        return {"accuracy": [0.5] * 3}

    app = toy_app(UPDATES, validate)
    play(app, start=10.0, server_lr=0.1)
    assert seen[:3] == pytest.approx([9.87, 9.785, 9.445])


def test_random_fusing_changes_from_round_to_round_and_repeats_with_the_seed() -> None:
    def models_seen(seed: Any) -> Any:
        seen: list[tuple[float, ...]] = []

        def validate(client: int, models: Sequence[float]) -> dict[str, object]:
            seen.append(tuple(models))
            return {"accuracy": [0.5] * 2}

        # Updates that cancel leave the global model where it was.
        app = toy_app((1.0, -1.0), validate)
        play(app, 2, rounds=2, fusing="random", p_hat=0.6, seed=seed)
        return seen

    first = models_seen(3)
    assert first[0] != first[2]
    assert first == models_seen(3)
    assert first != models_seen(4)


def test_the_mean_validation_loss_can_be_the_signal() -> None:
    losses = [[0.5, 1.5], [1.0, 3.0]]
    app = toy_app((1.0, 2.0), lambda j, _: {"loss": [row[j] for row in losses]})
    strategy, _, _ = play(app, 2, signal="loss", weighting="proportional")
    assert strategy.outcome.weights == pytest.approx((2 / 3, 1 / 3))


def test_a_client_that_drops_out_in_training_has_neither_row_nor_column() -> None:
    app = toy_app(UPDATES, lambda j, models: {"accuracy": [0.5] * len(models)})
    strategy, grid, w = play(app, faults=fault(2, "train", "drop"), tolerate_failures=True)
    assert strategy.outcome.boosting.clients == ("node-1", "node-3")
    assert strategy.outcome.boosting.validation.shape == (2, 2)
    assert w == pytest.approx(-3.5)
    assert [f.client for f in strategy.outcome.failures] == ["node-2"]
    asked = [m.metadata.dst_node_id for m in grid.log if "fused" in m.metadata.message_type]
    assert asked == [1, 3]


def test_a_client_that_drops_out_in_training_ends_the_run_where_failures_are_not_tolerated() -> (
    None
):
    with refused("run-failed", "node-2"):
        play(toy_app(UPDATES, by_row(V)), faults=fault(2, "train"))


@pytest.mark.parametrize("reason", ["gone", "drop"])
def test_a_validator_that_drops_out_costs_its_column_only(
    reason: Any, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, _, w = play(toy_app(UPDATES, by_row(V)), faults=fault(2, "evaluate.fused", reason))
    found = strategy.outcome.boosting
    assert [math.isnan(v) for v in found.validation[0]] == [False, True, False]
    # Sums of V are now 2 ln 2, 0, 0: softmax(2/3 ln 2, 0, 0)
    power = 2 ** (2 / 3)
    assert found.weights == pytest.approx([power / (power + 2), 1 / (power + 2), 1 / (power + 2)])
    assert w == pytest.approx(-sum(p * g for p, g in zip(found.weights, UPDATES, strict=True)))
    assert [f.client for f in strategy.outcome.failures] == ["node-2"]
    assert strategy.outcome.failures[0].reason.startswith("validation: ")
    assert "node-2 left out as a validator" in caplog.text


def test_a_lost_validator_is_left_out_of_the_mean_loss() -> None:
    losses = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]
    app = toy_app(UPDATES, lambda j, _: {"loss": [row[j] for row in losses]})
    strategy, _, _ = play(
        app,
        faults=fault(2, "evaluate.fused"),
        signal="loss",
        weighting="proportional",
    )
    assert strategy.outcome.weights == pytest.approx((4 / 7, 2 / 7, 1 / 7))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"accuracy": [0.1, 0.2]}, "sent 2 scores for 3 models"),
        ({"accuracy": [0.1, 0.2, 0.3, 0.4]}, "sent 4 scores for 3 models"),
        ({"accuracy": 0.5}, "sent 1 scores for 3 models"),
        ({"accuracy": [NAN, NAN, NAN]}, "no finite score"),
        ({"accuracy": [0.5, 99.0, 0.5]}, "99.0"),
        ({"loss": [0.5, 0.5, 0.5]}, "no metric 'accuracy'"),
    ],
)
def test_a_validator_with_unusable_scores_costs_its_column_and_is_named(
    answer: Any, words: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = by_row(V)
    app = toy_app(UPDATES, lambda j, m: answer if j == 1 else rows(j, m))
    strategy, _, _ = play(app)
    assert [f.client for f in strategy.outcome.failures] == ["node-2"]
    assert words in strategy.outcome.failures[0].reason
    assert words in caplog.text
    assert strategy.outcome.weights[0] > strategy.outcome.weights[1]


def test_no_validator_at_all_ends_the_run_and_says_what_a_clientapp_needs() -> None:
    with refused("run-failed", "app.evaluate("):
        play(toy_app(UPDATES))


def test_no_validator_at_all_is_uniform_with_a_warning_where_failures_are_tolerated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, _, w = play(toy_app(UPDATES), tolerate_failures=True)
    assert strategy.outcome.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert w == pytest.approx(-3.0)
    warned = [r for r in caplog.records if "weights are uniform" in r.getMessage()]
    assert [r.levelno for r in warned] == [logging.WARNING]


def test_all_clients_failing_in_training_ends_the_run_even_where_failures_are_tolerated() -> None:
    def gone(message: Any) -> Any:
        return "gone"

    with refused("run-failed", "node-1", "gone", "node-2", "node-3"):
        play(toy_app(UPDATES, by_row(V)), faults=gone, tolerate_failures=True)


def test_one_client_has_weight_one_and_is_not_asked_to_validate() -> None:
    strategy, grid, w = play(toy_app([3.0]), 1)
    assert w == pytest.approx(-3.0)
    assert strategy.outcome.weights == (1.0,)
    assert [m.metadata.message_type for m in grid.log] == ["train"]


def test_a_client_without_a_training_score_counts_as_the_worst_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = toy_app((1.0, 2.0), by_row([[0.5, 0.5], [0.5, 0.5]]), training=[0.9, None])
    strategy, _, _ = play(app, 2, weighting="proportional")
    assert strategy.outcome.weights == (1.0, 0.0)
    assert "node-2 sent no usable training score" in caplog.text


@pytest.mark.parametrize("claim", [1e9, -1.0, NAN, math.inf])
def test_an_impossible_training_score_buys_no_weight(claim: Any) -> None:
    app = toy_app((1.0, 2.0), by_row([[0.5, 0.5], [0.5, 0.5]]), training=[0.9, claim])
    strategy, _, _ = play(app, 2)
    assert strategy.outcome.weights[1] < 0.5


def test_no_training_score_from_anybody_leaves_the_validation_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = toy_app(UPDATES, by_row(V), training=[None, None, None])
    strategy, _, _ = play(app)
    assert strategy.outcome.weights == pytest.approx((0.5, 0.25, 0.25))
    assert "weights follow the validation alone" in caplog.text


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_an_update_that_is_not_finite_never_reaches_a_sum(bad: Any) -> None:
    app = toy_app((1.0, bad, 6.0), lambda j, models: {"accuracy": [0.5] * len(models)})
    strategy, _, w = play(app, tolerate_failures=True)
    assert w == pytest.approx(-3.5)
    assert "diverged" in strategy.outcome.failures[0].reason
    with refused("run-failed", "node-2", "NaN"):
        play(app)


def test_the_capture_hook_sees_the_updates_and_changes_nothing(tmp_path: Path) -> None:
    strategy = FedBoosting(min_nodes=3)
    grid = toy_grid(toy_app(UPDATES, by_row(V)), 3)
    result = HonestButCurious(strategy, ObservationStore(tmp_path)).start(
        grid, toy_arrays(10.0), num_rounds=1
    )
    assert value_of(result.arrays) == pytest.approx(7.5)
    seen = [o.update["w"].item() for o in ObservationStore(tmp_path)]
    assert seen == pytest.approx(list(UPDATES))


def test_the_training_score_is_asked_for_in_the_train_message() -> None:
    _, grid, _ = play(toy_app(UPDATES, by_row(V)))
    assert grid.log[0].content.config_records["config"]["training-score"] is True
    assert grid.log[-1].content.config_records["config"]["server-round"] == 1


def test_a_resumed_run_numbers_its_rounds_from_where_it_stopped() -> None:
    strategy = FedBoosting(min_nodes=3, first_round=5)
    grid = toy_grid(toy_app(UPDATES, by_row(V)), 3)
    strategy.start(grid, toy_arrays(), num_rounds=1, train_config=ConfigRecord())
    assert strategy.outcome.server_round == 5
    assert grid.log[-1].content.config_records["config"]["server-round"] == 5


@pytest.mark.parametrize(
    "wrong", [{"weighting": "max"}, {"signal": "f1"}, {"fusing": "dp"}, {"p_hat": 0.4}]
)
def test_unknown_options_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(BractError, match=next(iter(wrong))):
        FedBoosting(**wrong)
