import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.paillier import PaillierError, weights
from bract.paillier.errors import CapacityError
from bract.paillier.weights import integer_weights
from bract.updates import shares


def test_equal_clients_lose_nothing() -> None:
    assert integer_weights([1 / 3] * 3, 100) == [1, 1, 1]


def test_exact_proportions_are_found() -> None:
    assert integer_weights([100, 300, 50], 31) == [2, 6, 1]


def test_a_tiny_client_is_not_dropped() -> None:
    assert min(integer_weights([1.0, 1e-9], 31)) == 1


def test_an_absent_client_stays_absent() -> None:
    assert integer_weights([1.0, 0.0, 1.0], 31) == [1, 0, 1]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=20), st.integers(20, 300))
def test_sum_and_error_stay_within_their_limits(shares: list[float], max_sum: int) -> None:
    weights = np.array(integer_weights(shares, max_sum))
    real = np.array(shares) / sum(shares)
    assert weights.sum() <= max_sum
    plain = np.maximum(np.rint(real * (max_sum - len(shares))), 1)
    if plain.sum() <= max_sum:
        reached = np.abs(weights / weights.sum() - real).max()
        assert reached <= np.abs(plain / plain.sum() - real).max() + 1e-9


@given(st.lists(st.integers(1, 500), min_size=3, max_size=12), st.floats(0.05, 1.0))
def test_no_rounding_exceeds_the_largest_share(examples: list[int], most: float) -> None:
    largest = shares.largest_share(len(examples), most)
    found = integer_weights(shares.example_shares(examples, most), 31, most=largest)
    assert weights.allows(max(found), sum(found), largest)


def test_a_share_at_its_limit_is_not_rounded_beyond_it() -> None:
    real = [0.6, 0.16, 0.24]
    assert integer_weights(real, 8) == [5, 1, 2]  # 0.625
    assert integer_weights(real, 8, most=0.6) == [3, 1, 1]


def test_more_clients_than_the_sum_allows_are_refused() -> None:
    with pytest.raises(CapacityError, match="4 clients"):
        integer_weights([1, 1, 1, 1], 3)


@pytest.mark.parametrize("shares", [[], [0.0], [-1.0, 2.0], [float("nan")]])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(PaillierError, match="share"):
        integer_weights(shares, 10)
