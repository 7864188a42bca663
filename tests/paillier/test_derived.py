"""Randomness that key holders derive alike: the same plaintexts as by the slow way, always."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bract.paillier import Layout, PrivateKey, decrypt, encrypt, weighted_sum
from bract.paillier import derived as module
from bract.paillier.cipher import CipherVector, from_matrix
from bract.paillier.derived import Parts, check_parts, derived_exponents, joined_parts
from bract.paillier.errors import CiphertextError
from bract.paillier.scheme import PrivateScheme, scheme_for
from bract.paillier.sharing import KeyShare

RNG = np.random.default_rng(3)


def vectors(key: PrivateKey, degree: int = 1, count: int = 3) -> list[CipherVector]:
    layout = Layout(120, 1.0, 16, 100, key.public.bits, degree)
    return [encrypt(key, RNG.uniform(-1, 1, 120), layout, threads=1)[0] for _ in range(count)]


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the ciphertexts that are decrypted by exponentiation."""
    calls: list[int] = []
    slow = PrivateScheme.decrypt

    def counted(self: PrivateScheme, ciphertexts: object, *rest: object) -> object:
        calls.append(len(ciphertexts))  # type: ignore[arg-type]
        return slow(self, ciphertexts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PrivateScheme, "decrypt", counted)
    yield calls


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_known_randomness_gives_what_the_exponent_gives(
    djn_key: PrivateKey, slow_calls: list[int], degree: int
) -> None:
    total = weighted_sum(djn_key.public, vectors(djn_key, degree), [5, 0, 90])
    assert sorted(weight for _, weight in total.parts) == [5, 90]
    assert list(total.parts) == sorted(total.parts)
    again = weighted_sum(djn_key.public, [total, vectors(djn_key, degree, 1)[0]], [1, 2])
    assert sorted(weight for _, weight in again.parts) == [2, 5, 90]
    for vector in (total, again):
        fast = decrypt(djn_key, vector)
        assert slow_calls == []
        assert np.array_equal(fast, decrypt(djn_key, replace(vector, parts=())))
        assert slow_calls
        slow_calls.clear()


def test_wrong_nonces_cost_time_and_nothing_else(
    djn_key: PrivateKey, slow_calls: list[int]
) -> None:
    (vector,) = vectors(djn_key, count=1)
    wrong: Parts = (("00" * 32, 1),)
    assert np.array_equal(decrypt(djn_key, vector), decrypt(djn_key, replace(vector, parts=wrong)))
    assert sum(slow_calls) == vector.layout.rows


def test_an_altered_ciphertext_is_refused_with_parts_as_without(djn_key: PrivateKey) -> None:
    (vector,) = vectors(djn_key, count=1)
    data = vector.data.copy()
    data[2, -1] ^= 2
    for parts in (vector.parts, ()):
        with pytest.raises(CiphertextError, match="ciphertext 2 was not made with djn randomness"):
            decrypt(djn_key, replace(vector, data=data, parts=parts))


def test_exponents_are_blocks_of_shake_under_a_hash_of_the_key(djn_key: PrivateKey) -> None:
    nonce = "ab" * 32
    low, high = sorted((int(djn_key.p), int(djn_key.q)))
    width = (djn_key.public.bits + 7) // 8
    secret = hashlib.sha256(
        b"bract djn exponents 1" + low.to_bytes(width, "big") + high.to_bytes(width, "big")
    ).digest()
    bits = djn_key.public.exponent_bits
    size = -(-bits // 8)
    stream = hashlib.shake_256(secret + bytes.fromhex(nonce)).digest(2 * size)
    wanted = [int.from_bytes(stream[i * size : (i + 1) * size], "little") % 2**bits for i in (0, 1)]
    assert derived_exponents(djn_key, ((nonce, 1),), 2) == wanted
    assert derived_exponents(djn_key, ((nonce, 7),), 2) == [7 * e for e in wanted]
    assert max(wanted).bit_length() > bits - 60
    swapped = replace(
        djn_key, p=djn_key.q, q=djn_key.p, order_p=djn_key.order_q, order_q=djn_key.order_p
    )
    assert derived_exponents(swapped, ((nonce, 1),), 2) == wanted


def test_nonces_and_ciphertexts_never_repeat(djn_key: PrivateKey) -> None:
    layout = Layout(120, 1.0, 16, 100, djn_key.public.bits, 1)
    same = [encrypt(djn_key, np.zeros(120), layout, threads=1)[0] for _ in range(4)]
    assert len({vector.parts for vector in same}) == 4
    rows = [row.tobytes() for vector in same for row in vector.data]
    assert len(set(rows)) == len(rows)


def test_derived_randomness_is_in_the_subgroup_of_drawn_one(djn_key: PrivateKey) -> None:
    (vector,) = vectors(djn_key, count=1)
    scheme = scheme_for(djn_key, 1)
    assert isinstance(scheme, PrivateScheme)
    numbers = from_matrix(vector.data)
    exponents = derived_exponents(djn_key, vector.parts, vector.layout.rows)
    slow = scheme.decrypt(numbers, "djn")
    for number, exponent, plaintext in zip(numbers, exponents, slow, strict=True):
        # By the public key alone: h^(n r) (1+n)^m.
        n = scheme.n
        factor = pow(djn_key.public.h or 0, int(n) * exponent, int(n) ** 2)
        assert number == factor * (1 + n * plaintext) % n**2


def test_who_lacks_the_private_key_names_no_parts(
    djn_key: PrivateKey, standard_key: PrivateKey, shares: list[KeyShare]
) -> None:
    mine = vectors(djn_key, count=1)[0]
    public = encrypt(djn_key.public, np.zeros(120), mine.layout, threads=1)[0]
    assert public.parts == ()
    assert weighted_sum(djn_key.public, [mine, public], [1, 1]).parts == ()
    assert vectors(standard_key, count=1)[0].parts == ()
    assert encrypt(shares[0].public, np.zeros(120), mine.layout, threads=1)[0].parts == ()


def test_too_many_parts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PARTS", 3)
    one: Parts = (("ab" * 32, 1),)
    assert len(joined_parts([(one, 2)] * 3)) == 3
    assert joined_parts([(one, 2)] * 4) == ()


@pytest.mark.parametrize(
    "parts",
    [
        [["ab" * 32, 2]],
        [["ab" * 32, 0]],
        [["ab" * 32, True]],
        [["ab" * 32, 1.0]],
        [["ab" * 32, 2], ["ab" * 32, -1]],
        [["AB" * 32, 1]],
        [["ab", 1]],
        [[7, 1]],
        [["ab" * 32]],
        [1],
        {"a": 1},
        7,
    ],
)
def test_damaged_parts_are_refused(djn_key: PrivateKey, parts: object) -> None:
    vector = vectors(djn_key, count=1)[0]
    header = json.loads(json.dumps(vector.header()))
    assert CipherVector.from_header(header, vector.data).parts == vector.parts
    with pytest.raises(CiphertextError, match="damaged"):
        CipherVector.from_header(header | {"parts": parts}, vector.data)


def test_more_parts_than_are_allowed_are_refused() -> None:
    many: Parts = (("ab" * 32, 1),) * 1001
    with pytest.raises(CiphertextError, match="up to 1000 nonces"):
        check_parts(many, 1001)
