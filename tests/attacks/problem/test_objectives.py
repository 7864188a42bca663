from typing import Any

import pytest
import torch

from bract.attacks import Cosine
from bract.attacks.problem.objectives import (
    NoObjective,
    RelativeError,
    SquaredError,
    SquaredPlusNorm,
    agreement,
    layer_weights,
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
