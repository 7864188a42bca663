"""Baselines and retrieval of an upload: as many images, and the same choice of originals."""

import pytest
import torch

from bract.config import DataConfig
from bract.data.sources import open_source
from bract.inputs import References, Truth
from bract.inputs.image import Image
from bract.scores import base
from bract.scores.image import ImageScorer, score_images

SOURCE = open_source(DataConfig(name="digits"), "train")


def digits(first: int, count: int) -> Truth:
    chosen = list(range(first, first + count))
    return Truth(SOURCE.images(chosen, channels=1, size=16), SOURCE.labels[chosen])


@pytest.fixture
def references() -> References:
    return Image().references(DataConfig(name="digits", image_size=16), 0)


@pytest.fixture
def scorer(references: References) -> ImageScorer:
    return ImageScorer(references)


def test_a_baseline_may_choose_among_all_originals_as_the_attack_may(
    scorer: ImageScorer,
) -> None:
    truth, others = digits(0, 60), digits(300, 4).images
    scored = score_images(others, truth, perceptual=False)
    found = scorer.baselines({"same": others}, scored, truth, 4)["same"]
    # The same images with the same choice have the same scores, each beside its rank.
    assert [b.ssim for b in found] == [row.ssim for row in scored.rows]
    unmatched = score_images(others, Truth(truth.images[:4], truth.labels[:4]), perceptual=False)
    assert sum(b.mse or 0 for b in found) < sum(row.mse or 0 for row in unmatched.rows)


def test_where_every_original_has_an_image_the_baselines_are_its_own(
    scorer: ImageScorer, references: References
) -> None:
    truth = digits(0, 3)
    scored = score_images(truth.images[[2, 0, 1]], truth, perceptual=False)
    made = references.baselines(torch.tensor(scored.labels), 3, seed=0)
    found = scorer.baselines(made, scored, truth, 3)["class_mean"]
    means = references.class_mean(truth.labels)
    expected = score_images(means, truth, perceptual=False)
    assert [b.psnr for b in found] == [row.psnr for row in expected.rows]


def test_a_copy_is_retrieved_among_many_originals_and_another_persons_image_is_not(
    scorer: ImageScorer,
) -> None:
    truth = digits(0, 100)
    images = torch.cat([truth.images[[7]], digits(400, 3).images])
    scored = score_images(images, truth, perceptual=False)
    copy, *others = scorer.retrieval(images, scored, truth)
    assert copy is not None and copy.chance is not None and copy.chance == copy.least
    assert copy.chance < 1e-3 and copy.nearest
    assert copy.choices == 100 and copy.references >= 30
    assert all(other is not None and (other.chance or 0.0) > 0.01 for other in others)


def test_more_images_than_originals_are_a_choice_too(scorer: ImageScorer) -> None:
    truth = digits(0, 1)
    one = scorer.retrieval(truth.images, score_images(truth.images, truth), truth)[0]
    images = torch.cat([truth.images, digits(400, 4).images])
    five = scorer.retrieval(images, score_images(images, truth), truth)[0]
    assert one is not None and five is not None and one.chance is not None
    assert five.chance == pytest.approx(5 * one.chance) and five.choices == 5


def test_a_class_without_test_images_is_not_judged(scorer: ImageScorer) -> None:
    truth = Truth(digits(0, 1).images, torch.tensor([11]))
    scored = score_images(truth.images, truth, perceptual=False)
    assert scorer.retrieval(truth.images, scored, truth) == [None]


@pytest.mark.parametrize("values", [1, 3])
def test_a_guess_from_others_counts_as_an_attack_does(values: int) -> None:
    """In any order: the mean alone is far off where the others' own numbers are not."""
    drawn = torch.Generator().manual_seed(3)
    others, targets = (torch.rand(n, values, generator=drawn) for n in (200, 16))
    guess = base.target_guess(others, targets, seed=0)
    tries = [base.target_error(others[16 * i : 16 * i + 16], targets) for i in range(12)]
    assert guess < 1.1 * sum(tries) / len(tries)
    one = float((others.mean(0) - targets[0]).abs().mean())
    assert base.target_guess(others, targets[:1], seed=0) <= one + 1e-6
    assert base.target_guess(others[:1], targets, seed=0) == pytest.approx(
        float((others[0] - targets).abs().mean())
    )
