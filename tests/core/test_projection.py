"""One number of a tensor."""

import math

import pytest
import torch

from bract.updates.projection import projection


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, (1 << 20) + 5000])
def test_it_is_the_product_with_a_fixed_vector(count: int) -> None:
    value = torch.randn(count, generator=torch.Generator().manual_seed(1))
    wave = torch.cos(1.0 + 2.4 * torch.arange(count, dtype=torch.float64))
    expected = float((value.double() * wave).sum()) * math.sqrt(2.0 / max(1, count))
    assert projection(value) == pytest.approx(expected, abs=1e-8)
    if count > 1:
        assert projection(value.view(1, -1)) == projection(value)


def test_complex_values_are_taken_as_pairs() -> None:
    value = torch.randn(5000, dtype=torch.complex64)
    assert projection(value) == projection(torch.view_as_real(value))
