from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.schema.audit import at_cap
from bract.scores import match, mse, psnr, ssim
from bract.scores.image import identifiability, label_accuracy
from bract.scores.perceptual import (
    lpips_distance,
    lpips_unavailable,
    stlpips_distance,
    stlpips_unavailable,
)


def test_black_against_white_scores_zero_db() -> None:
    black, white = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
    assert mse(black, white).tolist() == [1.0]
    assert psnr(black, white).tolist() == [0.0]


def test_psnr_of_a_tenth_off_everywhere_is_twenty_db() -> None:
    image = torch.full((2, 3, 8, 8), 0.5)
    assert psnr(image + 0.1, image).tolist() == pytest.approx([20.0, 20.0], abs=1e-4)


def test_an_exact_copy_scores_the_ceiling_not_infinity() -> None:
    image = torch.rand(1, 1, 8, 8)
    assert psnr(image, image).tolist() == [100.0]


def test_each_image_is_scored_alone() -> None:
    originals = torch.zeros(2, 1, 8, 8)
    images = torch.stack([torch.zeros(1, 8, 8), torch.full((1, 8, 8), 0.5)])
    assert mse(images, originals).tolist() == [0.0, 0.25]


def test_ssim_of_a_constant_shift_follows_the_luminance_term() -> None:
    # Constant images a and b: (2ab + c1) / (a^2 + b^2 + c1) with c1 = 0.01^2.
    a, b, c1 = 0.25, 0.75, 1e-4
    wanted = (2 * a * b + c1) / (a * a + b * b + c1)
    found = ssim(torch.full((1, 1, 8, 8), a), torch.full((1, 1, 8, 8), b))
    assert found.tolist() == pytest.approx([wanted], abs=1e-6)


@pytest.mark.parametrize("size", [3, 4, 6, 7, 32])
def test_ssim_of_a_copy_is_one_at_every_size(size: Any) -> None:
    image = torch.rand(1, 3, size, size)
    assert ssim(image, image).tolist() == pytest.approx([1.0])


def test_ssim_refuses_images_without_a_window() -> None:
    with refused("data-shape", "3x3"):
        ssim(torch.rand(1, 1, 2, 2), torch.rand(1, 1, 2, 2))


def test_matching_undoes_a_three_cycle() -> None:
    originals = torch.rand(3, 1, 4, 4)
    cycled = originals[torch.tensor([1, 2, 0])]
    order = match(cycled, originals)
    assert order.tolist() == [2, 0, 1]
    assert torch.equal(cycled[order], originals)


def test_matching_accepts_duplicates_and_surplus_reconstructions() -> None:
    originals = torch.rand(1, 1, 4, 4).repeat(2, 1, 1, 1)
    images = torch.cat([torch.rand(1, 1, 4, 4), originals])
    assert sorted(match(images, originals).tolist()) == [1, 2]


def test_exact_copies_are_counted_as_at_the_cap() -> None:
    images = torch.rand(3, 1, 8, 8)
    found = psnr(torch.cat([images[:2], images[2:] * 0.5]), images)
    assert at_cap(found.tolist()) == 2


def test_label_accuracy_ignores_the_order_of_a_batch() -> None:
    assert label_accuracy(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 1])) == 1.0
    assert label_accuracy(torch.tensor([1, 1, 1]), torch.tensor([2, 1, 1])) == pytest.approx(2 / 3)


def test_identifiability_counts_the_candidates_that_are_nearer() -> None:
    original = torch.zeros(1, 1, 2, 2)
    reconstruction = torch.full((1, 1, 2, 2), 0.4)
    candidates = torch.stack(
        [torch.full((1, 2, 2), v) for v in (0.5, 0.3, 0.9, 1.0)]  # two are nearer to 0.4 than 0 is
    )
    assert identifiability(reconstruction, original, candidates).tolist() == [3]


def test_identifiability_breaks_ties_against_the_attacker() -> None:
    image = torch.full((1, 1, 2, 2), 0.5)
    assert identifiability(image, torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).tolist() == [2]


def test_lpips_without_weights_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    image = torch.rand(1, 1, 32, 32)
    assert lpips_distance(image, image, "alex") is None
    reason = lpips_unavailable("vgg")
    assert reason is not None
    assert "vgg16" in reason
    assert str(tmp_path) in reason


def test_st_lpips_stands_beside_lpips_under_its_own_name_or_says_how_to_get_it() -> None:
    image = torch.rand(2, 1, 32, 32)
    reason = stlpips_unavailable()
    found = stlpips_distance(image, image.flip(-1))
    if reason is not None:
        assert "bract[stlpips]" in reason
        assert found is None
        return
    assert found is not None
    assert found.shape == (2,)
    assert (found > 0).all()
    same = stlpips_distance(image, image)
    assert same is not None
    assert same.tolist() == [0.0, 0.0]
