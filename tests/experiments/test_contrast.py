"""Scores against a flat image, and pictures at a chosen contrast."""

import math

import pytest
import torch

from experiments.contrast import against_flat, compared, originals


def test_an_unrelated_image_of_the_right_contrast_is_three_decibels_below_a_flat_one() -> None:
    truth = torch.tensor([0.4, 0.6, 0.4, 0.6]).view(1, 2, 2)
    unrelated = torch.tensor([0.4, 0.4, 0.6, 0.6]).view(1, 2, 2)
    gain, flat, correlation = against_flat(unrelated, truth)
    assert gain == pytest.approx(-10 * math.log10(2), abs=1e-3)
    assert flat == pytest.approx(20.0, abs=1e-3)
    assert correlation == pytest.approx(0.0, abs=1e-6)
    assert against_flat(torch.full_like(truth, 0.5), truth)[0] == pytest.approx(0.0, abs=1e-3)
    assert against_flat(truth + 1e-4, truth)[2] == pytest.approx(1.0)


def test_pictures_differ_between_contrasts_in_contrast_alone() -> None:
    high, low = (originals("grey", contrast, 2, "choose").images for contrast in (0.15, 0.05))
    assert low.std(dim=(1, 2, 3), correction=0).tolist() == pytest.approx([0.05, 0.05], rel=1e-3)
    kept = (high > 0) & (high < 1)
    assert torch.allclose((high - 0.5)[kept], 3 * (low - 0.5)[kept], atol=1e-5)


def test_contrast_matters_where_the_interval_excludes_zero() -> None:
    def row(contrast: float, gains: list[float]) -> dict[str, object]:
        numbers = list(range(len(gains)))
        shared = {"sources_each": numbers, "networks_each": numbers}
        return {"contrast": contrast, "gain_each": gains, **shared}

    high = row(0.15, [0.0, 0.0, 0.0, 0.0])
    assert compared(high, high)["verdict"] == "reference"
    assert compared(row(0.05, [-2.0, -2.1, -1.9, -2.0]), high)["verdict"] == "matters"
    assert compared(row(0.05, [-2.0, 2.1, -1.9, 2.0]), high)["verdict"] == "open"
