"""Counts of classes where some images are in smaller batches, or in a part of an epoch."""

import time

import pytest
import torch
from torch import Tensor

from bract.attacks.problem.epoch_orders import batch_of, steps_per_epoch
from bract.attacks.solve import uneven_counts as module
from bract.attacks.solve.uneven_counts import uneven_counts


def shares_of(labels: Tensor, classes: int, batch: int, steps: int, *, shuffled: bool) -> Tensor:
    """What each class counts of all images, by going through every step."""
    images, found = len(labels), torch.zeros(classes, dtype=torch.float64)
    order = torch.arange(images)
    for step in range(steps):
        if shuffled and step % steps_per_epoch(images, batch) == 0:
            order = torch.randperm(images)
        taken = order[list(batch_of(step, images, batch))]
        found += torch.bincount(labels[taken], minlength=classes) / len(taken)
    return found * images / steps


def test_three_classes_by_hand() -> None:
    """Five images in batches of 2, 2 and 1, three epochs: class 2 was alone in every last one.

    Of nine steps, class 0 has (2 + 2 + 2) / 2, class 1 as much, and class 2 three: equal shares of
    five thirds for two, two and one image.
    """
    shares = torch.full((3,), 5.0 / 3.0, dtype=torch.float64)
    found = uneven_counts(shares, 5, 2, 9)
    assert found is not None and sorted(found.tolist()) == [1, 2, 2]


@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(21, 10, 30), (33, 32, 20), (41, 8, 30), (24, 4, 20), (25, 4, 38)],
)
def test_counts_come_back_from_exact_shares(
    images: int, batch: int, steps: int, shuffled: bool
) -> None:
    torch.manual_seed(0)
    right = 0
    for _ in range(5):
        labels = torch.randint(12, (images,))
        wanted = torch.bincount(labels, minlength=12)
        shares = shares_of(labels, 12, batch, steps, shuffled=shuffled)
        noisy = (shares + 0.03 * torch.randn(12, dtype=torch.float64)).clamp_min(0.0)
        found = uneven_counts(noisy, images, batch, steps)
        assert found is not None and int(found.sum()) == images
        right += int(torch.minimum(found, wanted).sum())
    assert right >= 0.9 * 5 * images


def test_too_many_and_what_is_not_finite_are_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = torch.ones(4, dtype=torch.float64)
    assert uneven_counts(shares, 4, 3, 1) is None  # no whole epoch
    assert uneven_counts(shares * torch.nan, 4, 3, 8) is None
    assert uneven_counts(shares, 4, 3, 8) is not None
    monkeypatch.setattr(module, "_MOST", 99)
    assert uneven_counts(shares, 4, 3, 8) is None


@pytest.mark.parametrize(
    ("images", "batch", "steps", "classes"),
    [(64, 63, 201, 1000), (8, 7, 10**9, 4000), (5792, 5791, 3, 2), (256, 255, 3, 1000)],
)
def test_no_declaration_takes_long(images: int, batch: int, steps: int, classes: int) -> None:
    shares = torch.rand(classes, dtype=torch.float64)
    begun = time.perf_counter()
    found = uneven_counts(shares * images / shares.sum(), images, batch, steps)
    assert found is None or int(found.sum()) == images
    assert time.perf_counter() - begun < 5.0
