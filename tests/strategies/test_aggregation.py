from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from bract.protocol.records import Contribution
from bract.strategies.aggregation import (
    aggregate,
    check_contribution,
    fedavg_weights,
    fusing_weights,
)
from bract.updates.update import weighted_sum


def contribution(
    update: Any, *, client: Any = "client-0", examples: Any = 1, **buffers: Any
) -> Any:
    return Contribution(
        node_id=1,
        client=client,
        update={"w": torch.tensor(update, dtype=torch.float32)},
        buffers={name: torch.tensor(value) for name, value in buffers.items()},
        num_examples=examples,
    )


def test_fixed_fusing_is_equation_4_5_for_three_clients() -> None:
    assert fusing_weights(3, 0.9) == [
        pytest.approx([0.9, 0.05, 0.05]),
        pytest.approx([0.05, 0.9, 0.05]),
        pytest.approx([0.05, 0.05, 0.9]),
    ]


def test_fused_models_of_three_updates_worked_by_hand() -> None:
    # 0.9 * 1 + 0.05 * (2 + 6) = 1.3; 0.9 * 2 + 0.05 * 7 = 2.15; 0.9 * 6 + 0.05 * 3 = 5.55
    answers = [contribution([g]) for g in (1.0, 2.0, 6.0)]
    sent = {"w": torch.tensor([10.0])}
    fused = [aggregate(sent, answers, row, 1.0)["w"].item() for row in fusing_weights(3, 0.9)]
    assert fused == pytest.approx([8.7, 7.85, 4.45])


@pytest.mark.parametrize("fusing", ["fixed", "random"])
@given(clients=st.integers(2, 12), p_hat=st.floats(0.51, 1.0), seed=st.integers(0, 2**31 - 1))
def test_each_fused_model_is_a_convex_combination_with_the_own_update_dominant(
    fusing: Any, clients: Any, p_hat: Any, seed: Any
) -> None:
    for i, row in enumerate(fusing_weights(clients, p_hat, fusing=fusing, seed=seed)):
        assert sum(row) == pytest.approx(1.0)
        assert min(row) >= 0.0
        assert row[i] >= p_hat - 1e-12
        assert row[i] == max(row)


def test_random_fusing_differs_with_the_seed_and_repeats_with_it() -> None:
    first = fusing_weights(3, 0.6, fusing="random", seed=1)
    assert first == fusing_weights(3, 0.6, fusing="random", seed=1)
    assert first != fusing_weights(3, 0.6, fusing="random", seed=2)


def test_one_client_is_fused_with_nobody() -> None:
    assert fusing_weights(1, 0.9) == [[1.0]]
    assert fusing_weights(1, 0.9, fusing="random") == [[1.0]]


@pytest.mark.parametrize("p_hat", [0.5, 0.0, 1.01, float("nan")])
def test_an_own_share_that_does_not_dominate_is_refused(p_hat: Any) -> None:
    with refused("config-value", "p_hat"):
        fusing_weights(3, p_hat)


@pytest.mark.parametrize("first", [True, False])
def test_who_sends_a_parameter_as_a_buffer_has_its_own_weight_of_it_alone(first: bool) -> None:
    """A hostile answer must neither end the run nor leave out what the others sent."""
    steps = [contribution([4.0]), contribution([-2.0])]
    other = Contribution(3, "x", {}, 1, buffers={"w": torch.tensor([9.0])})
    answers = [other, *steps] if first else [*steps, other]
    weights = [0.2, 0.5, 0.3] if first else [0.5, 0.3, 0.2]
    result = aggregate({"w": torch.tensor([1.0])}, answers, weights, 0.5)
    # 0.5 * (1 - 0.5 * 4) + 0.3 * (1 + 0.5 * 2) + 0.2 * 9
    assert result["w"].item() == pytest.approx(1.9)


def test_the_next_model_is_the_weighted_step_times_the_server_learning_rate() -> None:
    answers = [contribution([4.0]), contribution([-2.0])]
    # w - 0.5 * (0.75 * 4 - 0.25 * 2) = 1 - 1.25
    result = aggregate({"w": torch.tensor([1.0])}, answers, [0.75, 0.25], 0.5)
    assert result["w"].item() == pytest.approx(-0.25)


def test_buffers_are_averaged_and_integer_ones_rounded() -> None:
    sent = {"w": torch.zeros(1), "mean": torch.zeros(1), "steps": torch.tensor(0)}
    answers = [contribution([0.0], mean=[1.0], steps=3), contribution([0.0], mean=[5.0], steps=7)]
    result = aggregate(sent, answers, [0.25, 0.75], 1.0)
    assert result["mean"].item() == pytest.approx(4.0)
    assert result["steps"].item() == 6
    assert result["steps"].dtype == torch.int64


def test_fedavg_weights_follow_the_examples_or_are_uniform() -> None:
    answers = [contribution([0.0], examples=30), contribution([0.0], examples=10)]
    assert fedavg_weights(answers, "examples") == pytest.approx([0.75, 0.25])
    assert fedavg_weights(answers, "uniform") == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_refused_by_name(bad: Any) -> None:
    with refused("update-refused", "NaN"):
        check_contribution({"w": torch.zeros(1)}, contribution([bad]))


def test_sums_go_tensor_by_tensor_to_the_same_bits_as_over_whole_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = [
        {name: torch.randn(50, generator=generator) for name in ("v", "w")} for _ in range(5)
    ]
    weights = [0.1, 0.3, 0.2, 0.15, 0.25]
    total: dict[str, torch.Tensor] = {}
    for update, weight in zip(updates, weights, strict=True):
        for name, value in update.items():
            total[name] = total.get(name, 0.0) + value.double() * weight
    found = weighted_sum(updates, weights)
    assert all(torch.equal(found[name], total[name].float()) for name in total)
