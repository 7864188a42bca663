"""The powers that a client sends along are those that anybody computes from its ciphertexts."""

import numpy as np
import pytest

from bract.paillier import (
    Layout,
    PaillierError,
    PrivateKey,
    combine,
    decrypt,
    partial_decrypt,
    weighted_sum,
)
from bract.paillier.cipher import CipherVector, from_matrix, to_matrix
from bract.paillier.errors import CiphertextError
from bract.paillier.sharing import KeyShare, split
from bract.paillier.stripping import (
    check_powers,
    combine_powers,
    encrypt_with_powers,
    strip_messages,
)

WEIGHTS = [3, 0, 8, 20]


def layout(degree: int = 1) -> Layout:
    return Layout(70, 1.0, 16, 31, key_bits=512, degree=degree)


def encrypted(key: PrivateKey, plan: Layout) -> list[tuple[CipherVector, np.ndarray]]:
    rng = np.random.default_rng(5)
    found = []
    for _ in WEIGHTS:
        vector, powers, clipped = encrypt_with_powers(
            key.public, rng.uniform(-1, 1, plan.length), plan
        )
        assert clipped == 0
        found.append((vector, powers))
    return found


@pytest.mark.parametrize("degree", [1, 2])
def test_they_are_what_stripping_the_messages_leaves(djn_key: PrivateKey, degree: int) -> None:
    """The reference raises every ciphertext, and every ciphertext of the sum, to n^s."""
    parts = encrypted(djn_key, layout(degree))
    for vector, powers in parts:
        np.testing.assert_array_equal(powers, strip_messages(djn_key.public, vector))
        check_powers(djn_key.public, vector, powers)
    total = weighted_sum(djn_key.public, [v for v, _ in parts], WEIGHTS)
    found = combine_powers(djn_key.public, layout(degree), [p for _, p in parts], WEIGHTS)
    np.testing.assert_array_equal(found, strip_messages(djn_key.public, total))


def test_shares_decrypt_with_them(djn_key: PrivateKey) -> None:
    parts = encrypted(djn_key, layout())
    total = weighted_sum(djn_key.public, [v for v, _ in parts], WEIGHTS)
    powers = combine_powers(djn_key.public, layout(), [p for _, p in parts], WEIGHTS)
    shares: list[KeyShare] = split(djn_key, 2, 3)
    partials = [partial_decrypt(share, total, powers) for share in shares[:2]]
    np.testing.assert_array_equal(combine(shares[2], total, partials), decrypt(djn_key, total))


def test_randomness_is_drawn_anew_for_every_encryption(djn_key: PrivateKey) -> None:
    first, powers, _ = encrypt_with_powers(djn_key.public, np.zeros(70), layout())
    second, others, _ = encrypt_with_powers(djn_key.public, np.zeros(70), layout())
    assert not set(from_matrix(first.data)) & set(from_matrix(second.data))
    assert not set(from_matrix(powers)) & set(from_matrix(others))


def test_other_powers_are_refused(djn_key: PrivateKey) -> None:
    (vector, powers), (_, others), *_ = encrypted(djn_key, layout())
    scheme_n = djn_key.public.n
    changed = powers.copy()
    number = from_matrix(powers)[1] * (1 + scheme_n) % scheme_n**2
    changed[1] = to_matrix([number], powers.shape[1])[0]
    swapped = powers[[1, 0, *range(2, len(powers))]]
    for wrong in (others, changed, swapped):
        with pytest.raises(CiphertextError, match="not the n-th powers"):
            check_powers(djn_key.public, vector, wrong)
    with pytest.raises(CiphertextError, match="expected powers as uint8 of shape"):
        check_powers(djn_key.public, vector, powers[:-1])
    with pytest.raises(CiphertextError, match="out of range"):
        check_powers(djn_key.public, vector, np.full_like(powers, 255))


def test_a_key_of_standard_randomness_has_no_short_cut(standard_key: PrivateKey) -> None:
    with pytest.raises(PaillierError, match="no base h"):
        encrypt_with_powers(standard_key.public, np.zeros(70), layout())
