"""Baselines of the experiments' images, which use no gradient."""

import pytest
import torch

from experiments.harness.baselines import class_mean, random_image


def test_the_class_mean_is_of_the_wanted_class_or_of_all() -> None:
    images = torch.tensor([0.0, 0.2, 1.0]).view(3, 1, 1, 1).expand(3, 1, 2, 2)
    found = class_mean(images, torch.tensor([5, 5, 2]), torch.tensor([5, 9]))
    assert found[:, 0, 0, 0].tolist() == pytest.approx([0.1, 0.4])


def test_random_images_come_from_the_reference_and_repeat_under_a_seed() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1)
    one, two = (random_image(images, 20, seed=1) for _ in range(2))
    assert torch.equal(one, two)
    assert set(one.flatten().tolist()) <= set(range(5))
