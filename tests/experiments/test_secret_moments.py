import numpy as np
import pytest

from experiments.secret_moments import informations


def test_of_normal_samples_the_mean_uses_all_the_information() -> None:
    draw = np.random.default_rng(0)
    below, at, above = (draw.normal(x, 0.5, 200_000) for x in (-0.1, 0.0, 0.1))
    law, mean = informations(below, at, above, 0.2)
    assert law == pytest.approx(4.0, rel=0.1)
    assert mean == pytest.approx(4.0, rel=0.1)


def test_of_a_spread_that_grows_the_mean_uses_none() -> None:
    draw = np.random.default_rng(0)
    below, at, above = (draw.normal(0.0, 1.0 + x, 200_000) for x in (-0.1, 0.0, 0.1))
    law, mean = informations(below, at, above, 0.2)
    assert law == pytest.approx(2.0, rel=0.15)
    assert mean < 0.01
