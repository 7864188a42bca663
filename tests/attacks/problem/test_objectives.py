from typing import Any

import pytest
import torch

from bract.attacks import Cosine
from bract.attacks.problem.objectives import (
    EachTensor,
    NoObjective,
    RelativeError,
    SquaredError,
    SquaredPlusNorm,
    agreement,
    layer_weights,
    partial_weights,
)

SIMULATED = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[4.0]])}
CAPTURED = {"a": torch.tensor([[0.0, 0.0]]), "b": torch.tensor([[2.0]])}


@pytest.mark.parametrize(
    ("objective", "wanted"),
    [
        (Cosine(), 1 - 8 / (5 * 2)),
        (SquaredError(), 13.0),
        (RelativeError(), 13.0 / 4),
        (SquaredPlusNorm(), 13.0 + 13.0**0.5),
        (NoObjective(), 0.0),
    ],
)
def test_objectives_match_sums_by_hand(objective: Any, wanted: Any) -> None:
    assert objective(SIMULATED, CAPTURED, None).tolist() == pytest.approx([wanted], rel=1e-6)


@pytest.mark.parametrize(
    "objective", [Cosine(), SquaredError(), RelativeError(), SquaredPlusNorm()]
)
def test_a_coordinate_of_weight_zero_does_not_count(objective: Any) -> None:
    weights = {"a": torch.tensor([[0.0, 1.0]])}
    other = {**SIMULATED, "a": torch.tensor([[-70.0, 0.0]])}
    assert torch.equal(objective(SIMULATED, CAPTURED, weights), objective(other, CAPTURED, weights))


def test_trials_are_measured_apart() -> None:
    simulated = {"a": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}
    captured = {"a": torch.tensor([[1.0, 0.0], [2.0, 0.0]])}
    assert Cosine()(simulated, captured, None).tolist() == pytest.approx([0.0, 1.0])
    assert SquaredError()(simulated, captured, None).tolist() == [0.0, 8.0]


def test_the_cosine_resolves_what_float32_subtraction_cannot() -> None:
    captured = {"a": torch.tensor([[1.0, 0.0]])}
    simulated = {"a": torch.tensor([[1.0, 1e-5]])}
    assert Cosine()(simulated, captured, None).tolist() == pytest.approx([5e-11], rel=1e-2)


def test_agreement_is_cosine_and_relative_residual() -> None:
    cosine, residual = agreement(SIMULATED, CAPTURED)
    assert cosine.tolist() == pytest.approx([0.8])
    assert residual.tolist() == pytest.approx([(13 / 4) ** 0.5])


def test_layer_weights_favour_early_layers_with_mean_one() -> None:
    like = {name: torch.zeros(1, 2) for name in "abc"}
    assert layer_weights(like, "equal") is None
    for how in ("linear", "exponential"):
        weights = layer_weights(like, how)
        assert weights is not None
        values = [float(w[0, 0]) for w in weights.values()]
        assert values == sorted(values, reverse=True)
        assert sum(values) / 3 == pytest.approx(1.0)


def test_partial_matching_keeps_the_largest_entries_of_every_tensor() -> None:
    captured = {"a": torch.tensor([[1.0, -4.0, 2.0, 0.5]]), "b": torch.tensor([[0.1, 0.2, -0.3]])}
    found = partial_weights(captured, 0.5, "entries")
    assert found is not None
    assert found["a"].tolist() == [[0.0, 1.0, 1.0, 0.0]]
    # Half of three entries, rounded up.
    assert found["b"].tolist() == [[0.0, 1.0, 1.0]]


def test_partial_matching_keeps_whole_layers_by_their_mean_square() -> None:
    captured = {
        "a": torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0]]),
        "b": torch.tensor([[2.0], [2.0]]),
        "c": torch.tensor([[1.0, 1.0], [5.0, 5.0]]),
    }
    found = partial_weights(captured, 0.5, "layers")
    assert found is not None
    # Mean squares 2.25, 4, 1 in the first trial and 0.0025, 4, 25 in the second; two are kept.
    assert found["a"].tolist() == [[1.0] * 4, [0.0] * 4]
    assert found["b"].tolist() == [[1.0], [1.0]]
    assert found["c"].tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_partial_match_is_the_match_of_what_is_kept() -> None:
    captured = {"a": torch.tensor([[0.0, 5.0, 1.0]]), "b": torch.tensor([[2.0]])}
    simulated = {"a": torch.tensor([[9.0, 3.0, 7.0]]), "b": torch.tensor([[1.0]])}
    weights = partial_weights(captured, 0.3, "entries")
    # (3 - 5)^2 + (1 - 2)^2, and the cosine of (3, 1) and (5, 2).
    assert SquaredError()(simulated, captured, weights).tolist() == [5.0]
    wanted = 1 - 17 / (10 * 29) ** 0.5
    assert Cosine()(simulated, captured, weights).tolist() == pytest.approx([wanted], rel=1e-5)


def test_a_whole_share_weighs_nothing() -> None:
    assert partial_weights(CAPTURED, 1.0, "entries") is None


def test_each_tensor_counts_alike_and_the_largest_simulated_half_can_stand_for_it() -> None:
    simulated = {"a": torch.tensor([[3.0, 4.0, 0.0, 0.0]]), "b": torch.tensor([[1.0, 0.0]])}
    captured = {"a": torch.tensor([[3.0, 4.0, 0.0, 12.0]]), "b": torch.tensor([[0.0, 1.0]])}
    # a: mean difference 3, cosine 25 / (5 * 13); b: mean difference 1, cosine 0.
    whole = EachTensor()(simulated, captured, None)
    assert whole.item() == pytest.approx(3.0 + 1.0 - 25 / 65 + 1.0 + 1.0)
    # The largest simulated halves agree in a, and hold one number of b, which is 0 there.
    half = EachTensor(share=0.5)(simulated, captured, None)
    assert half.item() == pytest.approx(0.0 + 0.5 + 1.0)
    trusted = {"a": torch.tensor([[1.0, 1.0, 1.0, 0.0]]), "b": torch.zeros(1, 2)}
    assert EachTensor()(simulated, captured, trusted).item() == pytest.approx(1.0)
