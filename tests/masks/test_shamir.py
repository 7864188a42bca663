"""Shamir shares against a slow reference, by hand, and against Flower's of the same form."""

from __future__ import annotations

import contextlib
import importlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.masks import shamir

POLYNOMIAL = (1 << 128) | 0b10000111
"""x^128 + x^7 + x^2 + x + 1."""

SECRET = bytes(range(32))
PADDED = SECRET + b"\x10" * 16


def times(a: int, b: int) -> int:
    """Multiply in GF(2^128), a bit at a time."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a <<= 1
        a ^= POLYNOMIAL if a >> 128 else 0
        b >>= 1
    return product


def dealt(coefficients: list[list[int]], index: int) -> bytes:
    """The share at a point, of a polynomial for each chunk of the padded secret."""
    share = index.to_bytes(4, "little")
    for chunk, others in enumerate(coefficients):
        value, power = int.from_bytes(PADDED[16 * chunk : 16 * chunk + 16], "big"), 1
        for coefficient in others:
            power = times(power, index)
            value ^= times(coefficient, power)
        share += value.to_bytes(16, "big")
    return share


def test_times_is_that_of_the_field() -> None:
    assert times(1 << 127, 2) == 0b10000111
    assert times(3, 7) == 9, "(x + 1)(x^2 + x + 1) = x^3 + 1"


COEFFICIENTS = st.lists(st.lists(st.integers(0, (1 << 128) - 1), min_size=2, max_size=2),
                        min_size=3, max_size=3)  # fmt: skip


@given(coefficients=COEFFICIENTS, points=st.permutations(range(1, 40)))
def test_any_three_points_of_polynomials_of_degree_two_give_the_secret(
    coefficients: list[list[int]], points: list[int]
) -> None:
    assert shamir.combine_shares([dealt(coefficients, point) for point in points[:3]]) == SECRET


def test_a_known_answer() -> None:
    """f(x) = secret + x in each chunk: the share at 1 has the last bit of each chunk changed."""
    shares = [dealt([[1]] * 3, point) for point in (1, 2)]
    assert shares[0][:4] == b"\x01\x00\x00\x00"
    assert shares[0][4:20] == bytes(range(15)) + b"\x0e"
    assert shares[1][-1] == 0x10 ^ 2
    assert shamir.combine_shares(shares) == SECRET


def test_shares_are_points_of_fresh_polynomials_of_the_right_degree() -> None:
    shares = shamir.create_shares(SECRET, 3, 5)
    assert [len(share) for share in shares] == [52] * 5
    assert [int.from_bytes(share[:4], "little") for share in shares] == [1, 2, 3, 4, 5]
    for chosen in itertools.permutations(shares, 3):
        assert shamir.combine_shares(list(chosen)) == SECRET
    assert shamir.create_shares(SECRET, 3, 5) != shares
    # Two points fit any secret: one of 255 has a padding that is right, and none is this one.
    with contextlib.suppress(ValueError):
        assert shamir.combine_shares(shares[:2]) != SECRET


def test_shares_are_those_of_clients_that_have_flower_s() -> None:
    theirs = importlib.import_module("flwr.common.secure_aggregation.crypto.shamir")
    assert shamir.combine_shares(theirs.create_shares(SECRET, 3, 5)[1:4]) == SECRET
    assert theirs.combine_shares(shamir.create_shares(SECRET, 3, 5)[2:]) == SECRET


@pytest.mark.parametrize(
    "spoil",
    [
        lambda shares: [shares[0], shares[0], shares[1]],
        lambda shares: [shares[0], shares[1], shares[2][:-1]],
        lambda shares: [shares[0], shares[1], shares[2][:-1] + bytes([shares[2][-1] ^ 1])],
    ],
    ids=["twice", "short", "changed"],
)
def test_wrong_shares_give_no_secret(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(ValueError):
        shamir.combine_shares(spoil(shamir.create_shares(SECRET, 3, 5)))
