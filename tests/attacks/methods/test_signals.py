"""Attacks on uploads of models over time: convolutions, recurrent layers, linear layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from refusals import refused
from signal_uploads import signal_upload
from torch import nn

from bract.attacks import ATTACKS, IG, Budget, attack
from bract.config import SignalSchema
from bract.models.losses import label_rows, loss_of
from bract.models.recurrent import unroll
from bract.scores.signal import correlation

CLASSES = SignalSchema(channels=2, length=12, low=(-1.0,), high=(1.0,))
FORECAST = replace(CLASSES, task="forecast", horizon=3)


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("conv1d", FORECAST),
        ("lstm", replace(FORECAST, layout="time-first")),
    ],
)
def test_one_signal_is_solved_for_through_smooth_models(name: str, schema: SignalSchema) -> None:
    observation, signals, _ = signal_upload(name, schema)
    found = attack("gauss-newton")(observation, budget=Budget(iterations=60, restarts=3))
    assert float(correlation(found.images, signals)) > 0.999
    assert float((found.images - signals).abs().max()) < 0.01


def test_one_signal_is_matched_by_ig_with_total_variation_over_time() -> None:
    observation, signals, _ = signal_upload("conv1d", CLASSES)
    found = IG()(observation, budget=Budget(iterations=100))
    assert "total variation" in found.components
    assert float(correlation(found.images, signals)) > 0.9


@pytest.mark.parametrize("name", ["analytic", "auto"])
def test_a_linear_layer_first_gives_the_signal_by_its_algebra(name: str) -> None:
    observation, signals, _ = signal_upload("mlp-100", CLASSES)
    found = attack(name)(observation, budget=Budget(iterations=5))
    assert torch.allclose(found.images, signals, atol=1e-4)
    assert name != "auto" or found.pick.attack == "analytic"


def test_the_targets_of_one_forecast_are_read_from_the_last_layer() -> None:
    observation, _, labels = signal_upload("conv1d", FORECAST)
    found = attack("labels")(observation)
    assert torch.allclose(found.label_probabilities, labels, atol=1e-3)


def test_targets_of_a_batch_of_forecasts_are_searched_with_the_signals() -> None:
    observation, _, _ = signal_upload("conv1d", FORECAST, 3)
    found = IG()(observation, budget=Budget(iterations=5))
    assert "labels joint" in found.components
    assert len(found.label_probabilities.unique(dim=0)) == 3
    with refused("attack-unsuited", "ig"):
        attack("gauss-newton")(observation, budget=Budget(iterations=5))


def test_attacks_of_other_inputs_do_not_claim_signals() -> None:
    handle = {name for name in ATTACKS if "signal" in ATTACKS[name].inputs}
    assert {"ig", "dlg", "idlg", "gauss-newton", "analytic", "spear", "best", "auto"} <= handle
    assert not handle & {"grnn", "row-span", "r-gap", "patch-span", "tableak"}


def test_auto_lets_what_handles_signals_compete() -> None:
    observation, signals, _ = signal_upload("conv1d", CLASSES)
    found = attack("auto")(observation, budget=Budget(iterations=60))
    assert float(correlation(found.images, signals)) > 0.999


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 5, batch_first=True),
        nn.LSTM(3, 5, num_layers=2, bidirectional=True),
        nn.GRU(3, 5, num_layers=2),
        nn.GRU(3, 5, bidirectional=True, bias=False, batch_first=True),
        nn.RNN(3, 5),
        nn.RNN(3, 5, nonlinearity="relu", num_layers=2),
    ],
    ids=repr,
)
def test_unrolled_layers_return_what_pytorchs_do(layer: nn.RNNBase) -> None:
    inputs = torch.randn(4, 6, 3)
    outputs, state = layer(inputs)
    alone, last = layer(inputs[0])
    kept = (layer(inputs, state)[0]).detach()
    names = list(layer.state_dict())
    unroll(layer)
    assert list(layer.state_dict()) == names
    found, there = layer(inputs)
    assert torch.allclose(found, outputs, atol=1e-6)
    assert torch.allclose(layer(inputs, state)[0], kept, atol=1e-6)
    assert torch.allclose(layer(inputs[0])[0], alone, atol=1e-6)
    pairs = zip(there, state, strict=True) if isinstance(state, tuple) else [(there, state)]
    for one, other in pairs:
        assert torch.allclose(one, other, atol=1e-6)
    del last


def test_the_mean_squared_error_is_pytorchs_of_one_and_of_several_values() -> None:
    loss = loss_of("mse")
    for outputs, labels in (
        (torch.randn(5, 1), torch.randn(5)),
        (torch.randn(5, 3), torch.randn(5, 3)),
    ):
        wanted = nn.functional.mse_loss(outputs, labels.view_as(outputs))
        assert torch.allclose(loss.mean(outputs, labels), wanted)
        each = loss.each(outputs, label_rows(labels, outputs.shape[1], loss))
        assert torch.allclose(each.mean(), wanted)
