"""A usual normalisation is recognised by the range of the inputs, and by nothing narrower."""

from __future__ import annotations

import pytest
import torch

from bract.audit.description.normalisation import USUAL, normalisation_of


@pytest.mark.parametrize(("mean", "std"), USUAL)
def test_full_pictures_under_each_usual_normalisation_are_recognised(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    channels = max(len(mean), 1)
    pixels = torch.rand(6, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0.0, 1.0
    inputs = (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    found_mean, found_std = normalisation_of(inputs)
    assert found_mean == pytest.approx(mean) and found_std == pytest.approx(std)


def test_one_value_serves_all_channels_and_dark_pictures_are_taken_as_they_are() -> None:
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0.0, 1.0
    assert normalisation_of((pixels - 0.5) / 0.5) == ([0.5] * 3, [0.5] * 3)
    assert normalisation_of(0.3 * pixels) == ([0.0] * 3, [1.0] * 3)


def test_inputs_of_no_usual_range_are_left_open() -> None:
    assert normalisation_of(torch.linspace(-3.0, 3.3, 64).view(1, 1, 8, 8)) == (None, None)
