"""MinMax sampling is unbiased, and GLAUS puts together what its parts say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from refusals import refused

from experiments.papers.minmax import (
    draw,
    glaus,
    keep_probability,
    readings,
    sample,
    sent_value,
    threshold_of,
    times_drawn,
)
from experiments.papers.runners.base import Context
from experiments.papers.runners.sampled import SampledRunner, SampledSettings, mnist_cnn

VALUES = torch.tensor([3.0, -1.0, 0.5, 0.25, -2.0], dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(size: int, seed: int = 0) -> torch.Tensor:
    """Draw a heavy-tailed vector, as gradients are."""
    return torch.randn(size, generator=generator(seed)) ** 3


@pytest.mark.parametrize("threshold", [0.04, 1.0, 9.0])
def test_the_mean_over_all_masks_is_the_vector(threshold: float) -> None:
    chances = keep_probability(VALUES, threshold)
    mean, second = torch.zeros_like(VALUES), torch.zeros_like(VALUES)
    for mask in itertools.product([False, True], repeat=len(VALUES)):
        kept = torch.tensor(mask)
        weight = torch.where(kept, chances, 1.0 - chances).prod()
        sent = torch.where(kept, sent_value(VALUES, threshold), 0.0)
        mean += weight * sent
        second += weight * sent.square()
    assert torch.allclose(mean, VALUES)
    # One variance for all coordinates: the threshold.
    assert torch.allclose(second - VALUES.square(), torch.full_like(VALUES, threshold))


def test_what_is_sent_is_the_value_over_its_chance() -> None:
    assert torch.allclose(sent_value(VALUES, 2.0), VALUES / keep_probability(VALUES, 2.0))
    assert sent_value(torch.zeros(1), 2.0).tolist() == [0.0]


def test_a_score_is_above_a_threshold_with_the_stated_chance() -> None:
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    for value in (0.5, -2.0):
        share = (((1.0 / u - 1.0) * value**2) > 1.5).double().mean()
        assert float(share) == pytest.approx(value**2 / (value**2 + 1.5), abs=1e-5)


@pytest.mark.thorough
def test_a_fixed_number_of_coordinates_is_unbiased_too() -> None:
    given = generator()
    mean = torch.stack([sample(VALUES, 2, given).values for _ in range(20_000)])
    error = mean.std(dim=0) / 20_000**0.5
    assert bool(((mean.mean(dim=0) - VALUES).abs() < 5.0 * error).all())


def test_as_many_coordinates_are_drawn_as_asked_for() -> None:
    found = sample(gradient(1000), 50, generator())
    assert int(found.kept.sum()) == int((found.values != 0).sum()) == 50
    values = gradient(1000)
    whole = sample(values, 1000, generator())
    assert whole.threshold == 0.0
    assert torch.allclose(whole.values, values)


def test_what_was_sent_is_read_back_where_it_is_trusted() -> None:
    values = gradient(20_000)
    found = sample(values, 4000, generator())
    assert found.threshold <= threshold_of(found.values) < 1.001 * found.threshold
    read, trust = readings(found.values)
    assert bool((trust[~found.kept] == 0).all() and (read[~found.kept] == 0).all())
    large = found.kept & (values.square() > 2.0 * found.threshold)
    assert torch.allclose(read[large], values[large], rtol=0.01)
    assert torch.allclose(trust[large], 1.0 - found.threshold / values[large].square(), atol=0.01)
    # The other root stands where a small coordinate was drawn.
    small = found.kept & (values.square() < 0.5 * found.threshold)
    assert torch.allclose(read[small], found.threshold / values[small], rtol=0.01)


def test_glaus_takes_the_order_the_magnitudes_and_the_signs_from_where_they_are() -> None:
    found = glaus(
        times=torch.tensor([5, 0, 9, 1]),
        signs=torch.tensor([-1.0, 1.0, 1.0, -1.0]),
        own=torch.tensor([0.1, -4.0, 2.0, 3.0]),
        aggregate=torch.tensor([7.0, -7.0, -7.0, 7.0]),
    )
    assert found.tolist() == pytest.approx([-3.0, -0.1, 4.0, -2.0])


def test_many_samplings_tell_the_order_of_the_magnitudes() -> None:
    values = gradient(400)
    given = generator()
    true = values.abs().argsort().argsort().double()

    def agreement(times: int) -> float:
        ranks = times_drawn(values, 40, times, given).argsort(stable=True).argsort().double()
        return float(torch.corrcoef(torch.stack([true, ranks]))[0, 1])

    assert agreement(500) > 0.85
    assert agreement(1) < 0.5


def settings(**changes: Any) -> SampledSettings:
    return SampledSettings.model_validate(
        {"uploads": 2, "clients": 3, "iterations": 1, "samplings": 200, **changes}
    )


def cosines(**changes: Any) -> list[float]:
    found = SampledRunner().run(settings(**changes), 0, Context())
    assert not found.refused
    return [value for s in found.samples if (value := s.values["cosine"]) is not None]


def test_glaus_is_near_the_gradient_and_one_sampling_is_not() -> None:
    assert cosines(knows="gradient") == pytest.approx([1.0, 1.0], abs=1e-4)
    assert min(cosines()) > 0.95
    assert max(cosines(samplings=1)) < 0.8


def test_under_adadefense_glaus_is_far_from_the_gradient() -> None:
    assert max(cosines(defenses=({"name": "adadefense"},))) < 0.8


def test_the_networks_have_the_published_size() -> None:
    model = mnist_cnn(classes=10, channels=1, image_size=28, activation="relu")
    assert sum(p.numel() for p in model.parameters()) == 35_900
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"knows": "one upload", "ratio": 0.9}])
def test_the_picture_comes_back_from_sampled_gradients(changes: dict[str, Any]) -> None:
    given = settings(iterations=120, uploads=1, **changes)
    (sample_,) = SampledRunner().run(given, 0, Context()).samples
    ssim = sample_.values["ssim"]
    assert ssim is not None and ssim > 0.5
    assert sample_.values["label_accuracy"] == 1.0


def test_a_victim_s_class_must_have_clients_enough() -> None:
    with refused("data-empty", 100):
        SampledRunner().run(settings(clients=100), 0, Context())


def test_draws_depend_on_the_generator_alone() -> None:
    values = gradient(100)
    first, second = (draw(values, 10, generator(3)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
