import math
import random

import gmpy2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.paillier import PublicKey, powers
from bract.paillier.scheme import Scheme

TABLES = [powers.FixedBase(7, 10**9 + 7, 40, window) for window in (1, 3, 8, 11)]


@given(st.integers(0, 2**40 - 1))
def test_fixed_base_power_equals_pow(exponent: int) -> None:
    for table in TABLES:
        assert table.power(exponent) == pow(7, exponent, 10**9 + 7)


def test_an_exponent_beyond_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 40 bits"):
        powers.FixedBase(7, 10**9 + 7, 40).power(2**40)


@pytest.mark.parametrize("prime", [7, 101, 2**61 - 1, int(gmpy2.next_prime(2**200))])
@pytest.mark.parametrize("window", [1, 3, 6])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_powers_by_short_factors_equal_pow(prime: int, window: int, degree: int) -> None:
    """Of several lifts, those of 1 and -1 among them, at the ends of the range and between."""
    draw = random.Random(prime)
    modulus = prime ** (degree + 1)
    for residue in (1, prime - 1, 2, draw.randrange(2, prime)):
        lift = pow(residue, prime**degree, modulus)
        table = powers.LiftedBase(lift, prime, degree, 40, window)
        for exponent in (0, 1, 2, 2**40 - 1, *(draw.randrange(2**40) for _ in range(5))):
            assert table.power(exponent) == pow(lift, exponent, modulus)


def test_powers_by_short_factors_refuse_what_they_cannot_take() -> None:
    with pytest.raises(ValueError, match="divide p"):
        powers.LiftedBase(2, 101, 1, 40)
    with pytest.raises(ValueError, match="40 bits"):
        powers.LiftedBase(pow(2, 101, 101**2), 101, 1, 40).power(2**40)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_exponential_undoes_the_logarithm(degree: int) -> None:
    base = gmpy2.mpz(101)
    for value in (0, 1, 42, 101**degree - 1):
        u = powers.series_exponential(gmpy2.mpz(value), base, degree)
        assert powers.series_logarithm(u, base, degree) == value


@pytest.mark.parametrize("count", [1, 30, 100, 600, 20_000, 300_000])
def test_the_window_has_the_fewest_multiplications_that_fit(count: int) -> None:
    def multiplications(window: int) -> int:
        rows = math.ceil(256 / window)
        return rows * (int(2**window) + count)

    found = powers.best_window(256, 2048, count)
    fitting = [w for w in range(2, 15) if math.ceil(256 / w) * 2**w * 256 <= powers.TABLE_BYTES]
    assert multiplications(found) == min(multiplications(w) for w in fitting)


def test_a_window_is_bounded_by_memory() -> None:
    assert powers.best_window(1536, 6144, 10**9) < powers.best_window(256, 2048, 10**9)
    rows = math.ceil(1536 / powers.best_window(1536, 6144, 10**9))
    assert rows * 2 ** powers.best_window(1536, 6144, 10**9) * 768 <= powers.TABLE_BYTES


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2**20)), min_size=1, max_size=12))
def test_weighted_product_equals_the_product_of_powers(pairs: list[tuple[int, int]]) -> None:
    scheme = Scheme(PublicKey(1000003 * 1000033))
    bases = [gmpy2.mpz(base) for base, _ in pairs]
    weights = [weight for _, weight in pairs]
    modulus = scheme.cipher_modulus
    slow = math.prod(pow(b, w, modulus) for b, w in zip(bases, weights, strict=True)) % modulus
    assert scheme.weighted_product(bases, powers.Schedule(weights)) == slow


def test_small_weights_need_few_multiplications() -> None:
    assert powers.Schedule([31] * 10).multiplications < 10 + 15
    assert powers.Schedule([1, 1, 1]).multiplications <= 5
    assert powers.Schedule(list(range(22, 32))).multiplications < 10 * 5


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_logarithm_turns_a_power_of_one_plus_n_into_its_exponent(degree: int) -> None:
    n = 7 * 11
    modulus = n**degree
    unit = powers.series_logarithm(1 + n, n, degree)
    for m in (0, 1, 42, modulus - 1):
        u = pow(1 + n, m, modulus * n)
        assert powers.series_logarithm(u, n, degree) * pow(unit, -1, modulus) % modulus == m


@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_product_of_random_powers_equals_the_product_of_powers(count: int) -> None:
    """Half bytes serve few bases, bytes many."""
    draw = random.Random(count)
    modulus = gmpy2.mpz(1000003**2)
    bases = [gmpy2.mpz(draw.randrange(1, 1000003)) for _ in range(count)]
    exponents = draw.randbytes(16 * count)
    weights = [int.from_bytes(exponents[16 * i : 16 * i + 16], "big") for i in range(count)]
    slow = math.prod(pow(b, e, modulus) for b, e in zip(bases, weights, strict=True)) % modulus
    assert powers.random_product(bases, exponents, modulus) == slow
