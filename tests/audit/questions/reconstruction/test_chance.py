"""What stands out from images that were made without the gradient."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from bract.audit.questions.reconstruction.chance import (
    FEWEST,
    chance,
    chance_of_any,
    dissimilarity,
    views,
)
from bract.audit.questions.reconstruction.hommel import named
from bract.audit.questions.reconstruction.scores.image import pair
from bract.config import DataConfig
from bract.data.sources import open_source

SEARCHED = 8
PER_CLASS = 36


def digits() -> Any:
    sources = [open_source(DataConfig(name="digits"), split) for split in ("train", "test")]
    images = [s.images(list(range(len(s.labels))), channels=1, size=8) for s in sources]
    return torch.cat(images), torch.cat([s.labels for s in sources]).numpy()


IMAGES, LABELS = digits()
VIEWS = views(IMAGES)


def test_contrast_brightness_and_blur_do_not_count_and_another_image_does() -> None:
    from scipy.ndimage import gaussian_filter

    large = torch.nn.functional.interpolate(IMAGES[:40], size=(32, 32), mode="bilinear")
    faded = 0.3 * large + 0.4
    blurred = torch.from_numpy(gaussian_filter(large.numpy(), (0, 0, 3.0, 3.0)))
    for spoilt in (large, faded, blurred):
        apart = dissimilarity(spoilt, views(large))
        assert apart.diagonal().max() < 1e-5
        assert (apart + np.eye(40)).min() > 1e-3


def test_within_the_nearest_references_the_chance_is_a_rank() -> None:
    references = np.linspace(0.1, 0.9, 99)[None]
    for place in (1, 15, 50, 99):
        own = references[:, place - 1] + 1e-9
        assert chance(own, references) == pytest.approx((place + 1) / 100)


def test_the_tail_by_hand() -> None:
    # The 10 nearest of 99 are e^-1 of the 11th: each step is 1, their sum 10. A copy at e^-21 of it
    # is above the floor of 1e-6 only where that is e^-10: excess 10 and (1 + 10 / 10)^-10.
    edge = 0.5
    references = np.array([[edge * np.exp(-1)] * 10 + [edge] * 89])
    own = np.array([edge * np.exp(-10)])
    assert chance(own, references) == pytest.approx(0.11 * 2.0**-10)


def test_where_images_within_a_radius_grow_like_a_power_the_chance_is_exact() -> None:
    # Dissimilarities with P(d < r) = r^m are u^(1/m): whatever m, the chance is uniform below 0.1.
    rng = np.random.default_rng(0)
    for power in (1.0, 4.0, 30.0):
        drawn = rng.random((40_000, 100)) ** (1 / power)
        found = chance(np.maximum(drawn[:, 0], 2e-6), np.maximum(drawn[:, 1:], 2e-6))
        for rate in (0.05, 0.01, 0.001):
            assert (found <= rate).mean() == pytest.approx(rate, rel=0.25)


def test_identical_references_show_nothing_extreme() -> None:
    same = np.full((1, 36), 0.5)
    assert chance(np.array([0.4]), same) > 1e-9
    assert chance(np.array([0.5]), same) == 1.0


def test_every_original_that_there_was_to_choose_among_is_paid_for() -> None:
    references = {c: np.sort(np.random.default_rng(c).random((3, 36)), axis=1) for c in (0, 1)}
    own = np.array([0.01, 0.1, 0.9])
    alone = [chance(own, references[c]) for c in (0, 1)]
    found = chance_of_any(own, references, {0: 2, 1: 5}, 0)
    assert found == pytest.approx(np.minimum(2 * alone[0] + 5 * alone[1], 1.0))
    # A class that has no references is taken for the matched one.
    without = chance_of_any(own, references, {0: 2, 9: 5}, 1)
    assert without == pytest.approx(np.minimum(2 * alone[0] + 5 * alone[1], 1.0))


def closed(values: Any, rate: float) -> Any:
    """Test every set of hypotheses by Simes: the slow reference."""
    falls = {
        subset: bool((np.sort(values[list(subset)]) <= rate * np.arange(1, size + 1) / size).any())
        for size in range(1, len(values) + 1)
        for subset in itertools.combinations(range(len(values)), size)
    }
    return [all(f for subset, f in falls.items() if i in subset) for i in range(len(values))]


def test_what_is_named_is_the_closure_of_simes_test() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 6, 8):
        for power in (1, 3, 6):
            values = rng.random(size) ** power
            assert named(values.tolist(), 0.05) == closed(values, 0.05)
    assert named([], 0.05) == []


def test_many_small_chances_name_each_other_where_one_would_not_do() -> None:
    assert named([0.008] + [0.9] * 7, 0.05) == [False] * 8
    assert all(named([0.008] * 8, 0.05))


class Run:
    """One simulated run: its references, its clients, and everybody else."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        order = self.rng.permutation(len(IMAGES))
        chosen = [order[LABELS[order] == label][:PER_CLASS] for label in range(10)]
        self.references = np.concatenate(chosen)
        self.means = torch.stack([IMAGES[found].mean(dim=0) for found in chosen])
        rest = order[~np.isin(order, self.references)]
        self.clients, self.others = rest[:705], rest[705:]

    def chances(self, images: Any, truth: Any) -> Any:
        order, kept = pair(images, IMAGES[truth])
        originals, images = truth[kept.numpy()], images[order]
        own = dissimilarity(images, VIEWS[:, originals]).diagonal()
        apart = dissimilarity(images, VIEWS[:, self.references]).reshape(-1, 10, PER_CLASS)
        counts = Counter(LABELS[truth].tolist())
        return chance_of_any(own, {c: apart[:, c] for c in counts}, counts, int(LABELS[truth[0]]))

    def client(self, originals: int) -> Any:
        return self.rng.permutation(self.clients)[:originals]

    def made(self, kind: str, truth: Any) -> Any:
        count = min(len(truth), SEARCHED)
        if kind == "class means":
            return self.means[LABELS[self.rng.choice(truth, count)]]
        if kind == "prior":
            return torch.from_numpy(self.rng.random((count, 1, 8, 8))).float()
        drawn = IMAGES[self.rng.choice(self.others, count, replace=False)]
        other = IMAGES[self.rng.choice(self.others, count)]
        return (drawn + other) / 2 if kind == "blends" else drawn


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("originals", "uploads", "runs"),
    [(1, 1, 200), (1, 100, 10), (8, 10, 20), (700, 1, 30), (700, 20, 4)],
)
def test_runs_without_a_gradient_name_an_image_in_at_most_five_percent(
    originals: int, uploads: int, runs: int
) -> None:
    for kind in ("other people", "class means", "blends", "prior"):
        alarms = 0
        for seed in range(runs):
            run = Run(seed)
            truths = [run.client(originals) for _ in range(uploads)]
            found = [run.chances(run.made(kind, truth), truth) for truth in truths]
            alarms += any(named(np.concatenate(found).tolist(), 0.05))
        # 5 % and three standard deviations of a share of so many runs.
        assert alarms / runs <= 0.05 + 3 * (0.05 * 0.95 / runs) ** 0.5, kind


def test_with_the_best_of_700_originals_other_people_are_near_but_named_by_nobody() -> None:
    # The rule that this one replaced took the SSIM of the best original for what it was worth.
    from bract.audit.questions.reconstruction.scores.image import ssim

    run = Run(0)
    truth = run.client(700)
    images = run.made("other people", truth)
    order, kept = pair(images, IMAGES[truth])
    assert (ssim(images[order], IMAGES[truth][kept]) >= 0.5).all()
    assert not any(named(run.chances(images, truth).tolist(), 0.05))


def test_noisy_copies_are_named_in_a_batch_and_over_many_uploads() -> None:
    run = Run(1)
    found = []
    for _ in range(20):
        truth = run.client(8)
        grain = torch.from_numpy(run.rng.normal(size=(8, 1, 8, 8))).float()
        found.append(run.chances((IMAGES[truth] + 0.08 * grain).clamp(0, 1), truth))
    assert np.mean(named(found[0].tolist(), 0.05)) >= 0.8
    assert np.mean(named(np.concatenate(found).tolist(), 0.05)) >= 0.8


def test_an_exact_copy_among_700_originals_stands_out_by_itself() -> None:
    run = Run(2)
    truth = run.client(700)
    images = run.made("other people", truth)
    images[3] = IMAGES[truth[5]]
    above = named(run.chances(images, truth).tolist(), 0.05)
    assert sum(above) == 1


def test_fewest_references_can_still_show_a_copy_of_one_image() -> None:
    references = np.random.default_rng(0).random((1, FEWEST)) ** 0.25
    assert chance(np.zeros(1), references)[0] < 0.05
