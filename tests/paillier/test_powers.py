import math
import random

import gmpy2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.paillier.keys import PublicKey
from bract.paillier.powers import FixedBase, Schedule, random_product, series_logarithm
from bract.paillier.scheme import Scheme


@given(st.integers(0, 2**40 - 1))
def test_fixed_base_power_equals_pow(exponent: int) -> None:
    table = FixedBase(7, 10**9 + 7, 40)
    assert table.power(exponent) == pow(7, exponent, 10**9 + 7)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 2**20)), min_size=1, max_size=12))
def test_weighted_product_equals_the_product_of_powers(pairs: list[tuple[int, int]]) -> None:
    scheme = Scheme(PublicKey(1000003 * 1000033))
    bases = [gmpy2.mpz(base) for base, _ in pairs]
    weights = [weight for _, weight in pairs]
    modulus = scheme.cipher_modulus
    slow = math.prod(pow(b, w, modulus) for b, w in zip(bases, weights, strict=True)) % modulus
    assert scheme.weighted_product(bases, Schedule(weights)) == slow


def test_small_weights_need_few_multiplications() -> None:
    assert Schedule([31] * 10).multiplications < 10 + 15
    assert Schedule([1, 1, 1]).multiplications <= 5
    assert Schedule(list(range(22, 32))).multiplications < 10 * 5


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_logarithm_turns_a_power_of_one_plus_n_into_its_exponent(degree: int) -> None:
    n = 7 * 11
    modulus = n**degree
    unit = series_logarithm(1 + n, n, degree)
    for m in (0, 1, 42, modulus - 1):
        u = pow(1 + n, m, modulus * n)
        assert series_logarithm(u, n, degree) * pow(unit, -1, modulus) % modulus == m


@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_product_of_random_powers_equals_the_product_of_powers(count: int) -> None:
    """Half bytes serve few bases, bytes many."""
    draw = random.Random(count)
    modulus = gmpy2.mpz(1000003**2)
    bases = [gmpy2.mpz(draw.randrange(1, 1000003)) for _ in range(count)]
    exponents = draw.randbytes(16 * count)
    powers = [int.from_bytes(exponents[16 * i : 16 * i + 16], "big") for i in range(count)]
    slow = math.prod(pow(b, e, modulus) for b, e in zip(bases, powers, strict=True)) % modulus
    assert random_product(bases, exponents, modulus) == slow
