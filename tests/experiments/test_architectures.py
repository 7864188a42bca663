"""The residual networks of the map, and its rules."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from bract.models import create_model
from experiments.architectures import MAP, Architecture, ResidualNet, _cells, compared


def net(architecture: Architecture) -> ResidualNet:
    made = create_model(
        architecture.model, classes=10, channels=1, image_size=16, activation="relu"
    )
    assert isinstance(made, ResidualNet)
    return made


@pytest.mark.parametrize("architecture", MAP, ids=lambda one: one.change)
def test_models_of_the_map_have_the_depth_and_width_that_they_name(
    architecture: Architecture,
) -> None:
    made = net(architecture)
    convolutions = [m for m in made.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1 + 6 * architecture.blocks
    assert made.classifier.in_features == 4 * architecture.width
    assert made(torch.rand(2, 1, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(
    ("shortcut", "order", "expected"),
    [("yes", "before", -1.0), ("no", "before", 0.0), ("yes", "after", 0.0), ("no", "after", 0.0)],
)
def test_a_block_without_weights_passes_on_what_its_shortcut_and_order_let_through(
    shortcut: str, order: str, expected: float
) -> None:
    block = net(Architecture(shortcut=shortcut, order=order)).blocks[0].train()
    for layer in block.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.weight)
    assert torch.equal(block(torch.full((1, 32, 4, 4), -1.0)).unique(), torch.tensor([expected]))


def test_a_cell_leaks_and_a_change_closes_it_where_intervals_say_so() -> None:
    def row(psnr: list[float], guess: float = 10.0) -> dict[str, Any]:
        return {"psnr_each": psnr, "guess_each": [guess] * len(psnr)}

    first = [20.0, 20.5, 19.5, 20.2]
    assert compared(row(first), first)["verdict"] == "leaks"
    assert compared(row(first), first)["effect"] == "reference"
    closed = compared(row([9.0, 9.2, 8.9, 9.1]), first)
    assert (closed["verdict"], closed["effect"]) == ("does not", "closes")
    wide = compared(row([5.0, 25.0, 8.0, 30.0]), first)
    assert (wide["verdict"], wide["effect"]) == ("open", "open")


def test_an_exact_image_counts_forty_decibels() -> None:
    exact = {"psnr_each": [90.0, 41.0, 60.0], "guess_each": [9.0, 10.0, 11.0]}
    found = compared(exact, [40.0, 40.0, 40.0])
    assert (found["over_guess"], found["change"], found["verdict"]) == (30.0, 0.0, "leaks")


def test_controls_stand_beside_the_map_and_normalise_by_running_statistics() -> None:
    options = Namespace(state=["fresh"], activation=["relu", "sigmoid"], attack=["ig"])
    cells = list(_cells(options))
    assert [c.activation for c in cells if c.mode == "eval"] == ["relu", "sigmoid"]
    assert len(cells) == 2 + 2 * len(MAP)
