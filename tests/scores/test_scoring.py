from typing import Any

import pytest
import torch
from refusals import refused

from bract.inputs import Truth
from bract.inputs.image import pixels_of
from bract.scores.image import oracle, score_images


def noise(count: Any, seed: Any) -> Any:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_pairs_stand_beside_each_other_after_a_three_cycle() -> None:
    originals = noise(3, 0)
    scored = score_images(
        originals[[1, 2, 0]],
        Truth(originals, torch.tensor([5, 6, 7])),
        recovered=torch.tensor([6, 7, 5]),
        candidates=noise(9, 1),
    )
    assert [row.mse for row in scored.rows] == [0.0, 0.0, 0.0]
    assert scored.labels == [5, 6, 7]
    assert scored.label_accuracy == 1.0
    assert all(row.identified_top1 for row in scored.rows)


def test_fewer_reconstructions_than_originals_identify_nobody() -> None:
    truth = Truth(noise(50, 0), torch.zeros(50, dtype=torch.int64))
    scored = score_images(noise(2, 3), truth, candidates=noise(9, 1))
    assert len(scored.rows) == 2
    assert all(row.identified_top1 is None for row in scored.rows)
    exact = score_images(truth.images[[7, 30]], truth, candidates=noise(9, 1))
    assert [row.mse for row in exact.rows] == [0.0, 0.0]


def test_one_reconstruction_of_three_originals_has_no_rank_wherever_it_is_scored() -> None:
    truth = Truth(noise(3, 0), torch.tensor([0, 1, 2]))
    (row,) = score_images(truth.images[[1]], truth, candidates=noise(9, 1)).rows
    assert row.psnr == 100.0
    assert row.rank is None and row.identified_top1 is None
    three = score_images(truth.images, truth, candidates=noise(9, 1)).rows
    assert [found.rank for found in three] == [1, 1, 1]


def test_what_was_not_asked_for_is_left_open() -> None:
    truth = Truth(noise(2, 0), torch.tensor([0, 1]))
    scored = score_images(noise(2, 1), truth, perceptual=False)
    assert scored.label_accuracy is scored.candidates is None
    assert [row.rank for row in scored.rows] == [None, None]
    assert [row.lpips_alex for row in scored.rows] == [None, None]


def test_oracle_picks_the_restart_nearest_to_the_truth() -> None:
    originals = torch.rand(2, 1, 8, 8)
    assert oracle([torch.rand(2, 1, 8, 8), originals.flip(0), originals * 0], originals) == 1


def test_oracle_of_fewer_images_judges_each_by_the_original_it_explains() -> None:
    originals = noise(3, 0)
    assert oracle([noise(1, 5), originals[[2]] * 0.9], originals) == 1
    with pytest.raises(ValueError):
        oracle([], originals)


def test_pixels_that_a_normalisation_squeezes_are_refused() -> None:
    pixels = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    inputs = (pixels - 0.5) / 0.5
    assert torch.allclose(pixels_of(inputs, [0.5], [0.5]), pixels, atol=1e-6)
    with refused("data-value", "input.mean", "input.std"):
        pixels_of(inputs, [0.5], [0.1])
    # A dark photograph is what it is.
    dark = (pixels * 50).round() / 255
    assert torch.allclose(pixels_of((dark - 0.5) / 0.5, [0.5], [0.5]), dark, atol=1e-6)
