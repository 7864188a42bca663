import dataclasses
import itertools
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bract.paillier import (
    Layout,
    PaillierError,
    PrivateKey,
    PublicKey,
    combine,
    deal,
    decrypt,
    encrypt,
    generate_keypair,
    partial_decrypt,
    weighted_sum,
)
from bract.paillier.cipher import CipherVector, from_matrix, to_matrix
from bract.paillier.errors import (
    CiphertextError,
    KeyMismatchError,
    PartialError,
    ThresholdError,
    UndecryptableError,
)
from bract.paillier.proofs import Proof, Statement, prove
from bract.paillier.scheme import Scheme
from bract.paillier.sharefile import load_share, read_share, save_share
from bract.paillier.sharing import KeyShare, lagrange, split
from bract.paillier.stripping import strip_messages
from bract.paillier.threshold import PartialDecryption

LAYOUT = Layout(70, 1.0, 16, 31, key_bits=512)


def aggregate(shares: list[KeyShare], layout: Layout = LAYOUT) -> tuple[CipherVector, np.ndarray]:
    rng = np.random.default_rng(3)
    public = shares[0].public
    values = rng.uniform(-1, 1, (3, layout.length))
    vectors = [encrypt(public, row, layout)[0] for row in values]
    total = weighted_sum(public, vectors, [3, 8, 20])
    return total, np.average(values, axis=0, weights=[3, 8, 20])


def test_lagrange_coefficients_worked_by_hand() -> None:
    """Points 1, 2, 4 of 4, D = 24: 24*8/3 = 64, 24*4/-2 = -48, 24*2/6 = 8, which sum to 24."""
    assert lagrange([1, 2, 4], 24) == [64, -48, 8]


def test_toy_sharing_of_the_decryption_exponent() -> None:
    """p = 23, q = 59: alpha = 11 * 29 = 319; any two shares give 24 e with n e = -1 mod 319."""
    shares = split(PrivateKey.from_primes(23, 59, insecure=True), 2, 4)
    for pair in itertools.combinations(shares, 2):
        coefficients = lagrange([share.index for share in pair], 24)
        secret = sum(c * share.value for c, share in zip(coefficients, pair, strict=True))
        assert 23 * 59 * secret % 319 == -24 % 319


def test_a_single_share_is_uniform() -> None:
    """Every residue modulo 319 turns up as the first share of the toy key, about 20 times."""
    key = PrivateKey.from_primes(23, 59, insecure=True)
    counts = Counter(split(key, 2, 2)[0].value for _ in range(319 * 20))
    assert len(counts) > 315
    assert max(counts.values()) < 60


@pytest.mark.parametrize("randomness", ["djn", "standard"])
def test_an_existing_key_decrypts_what_its_shares_decrypt(
    djn_key: PrivateKey, standard_key: PrivateKey, randomness: str
) -> None:
    key = djn_key if randomness == "djn" else standard_key
    shares = split(key, 2, 3)
    total, mean = aggregate(shares)
    assert total.randomness == randomness
    stripped = strip_messages(key.public, total)
    partials = [partial_decrypt(share, total, stripped) for share in shares[:2]]
    result = combine(shares[2], total, partials)
    np.testing.assert_array_equal(result, decrypt(key, total))
    assert np.abs(result - mean).max() <= LAYOUT.fixed_point.bound


def test_stripping_leaves_nothing_of_the_message(djn_key: PrivateKey) -> None:
    scheme = Scheme(djn_key.public)
    factor = scheme.randomizer("djn")
    vectors = [
        CipherVector(
            djn_key.public.key_id,
            Layout(1, 1.0, 16, 1, 512),
            to_matrix([scheme.embed(m) * factor % scheme.cipher_modulus], 128),
        )
        for m in (0, 12345)
    ]
    first, second = (strip_messages(djn_key.public, vector) for vector in vectors)
    np.testing.assert_array_equal(first, second)


def test_a_stripped_vector_of_another_shape_is_refused(shares: list[KeyShare]) -> None:
    total, _ = aggregate(shares)
    stripped = strip_messages(shares[0].public, total)
    with pytest.raises(CiphertextError, match="truncated"):
        partial_decrypt(shares[0], total, stripped[:-1])


def test_shares_of_a_djn_key_refuse_standard_randomness(shares: list[KeyShare]) -> None:
    vector, _ = encrypt(shares[0].public, np.zeros(70), LAYOUT, randomness="standard")
    with pytest.raises(CiphertextError, match="do not decrypt standard randomness"):
        partial_decrypt(shares[0], vector)


def test_every_large_enough_group_decrypts(shares: list[KeyShare]) -> None:
    total, mean = aggregate(shares)
    partials = [partial_decrypt(share, total) for share in shares]
    for group in itertools.combinations(partials, 3):
        result = combine(shares[0], total, group)
        assert np.abs(result - mean).max() <= LAYOUT.fixed_point.bound
    result = combine(shares[0], total, partials[::-1])
    assert np.abs(result - mean).max() <= LAYOUT.fixed_point.bound


@pytest.mark.parametrize(("degree", "randomness"), [(1, "standard"), (2, "djn"), (3, "djn")])
def test_other_degrees_and_randomness_decrypt(degree: int, randomness: Any) -> None:
    shares = deal(2, 3, 256, degree=degree, randomness=randomness, insecure=True)
    layout = Layout(40, 1.0, 16, 31, key_bits=256, degree=degree)
    total, mean = aggregate(shares, layout)
    partials = [partial_decrypt(share, total) for share in shares[1:]]
    result = combine(shares[0], total, partials)
    assert np.abs(result - mean).max() <= layout.fixed_point.bound


def test_too_few_answers_are_a_clear_error(shares: list[KeyShare]) -> None:
    total, _ = aggregate(shares)
    partials = [partial_decrypt(share, total) for share in (shares[0], shares[4])]
    with pytest.raises(ThresholdError, match=r"2 of 5 clients answered \(shares \[1, 5\]\), 3 are"):
        combine(shares[0], total, partials)
    with pytest.raises(ThresholdError, match=r"0 of 5 clients answered"):
        combine(shares[0], total, [])


def test_too_few_shares_pretending_to_be_enough_read_nothing(shares: list[KeyShare]) -> None:
    total, _ = aggregate(shares)
    lowered = [dataclasses.replace(share, threshold=2) for share in shares[:2]]
    partials = [partial_decrypt(share, total) for share in lowered]
    with pytest.raises(UndecryptableError, match="do not fit together"):
        combine(lowered[0], total, partials)


def test_one_share_answering_twice_is_refused(shares: list[KeyShare]) -> None:
    total, _ = aggregate(shares)
    partial = partial_decrypt(shares[0], total)
    with pytest.raises(ThresholdError, match="more than once"):
        combine(shares[0], total, [partial] * 3)


def test_answers_to_another_vector_are_refused(shares: list[KeyShare]) -> None:
    total, _ = aggregate(shares)
    other, _ = aggregate(shares)
    partials = [partial_decrypt(share, total) for share in shares[:2]]
    partials.append(partial_decrypt(shares[2], other))
    with pytest.raises(ThresholdError, match="share 3 decrypted another vector"):
        combine(shares[0], total, partials)


def shifted(partial: PartialDecryption, key: PublicKey, row: int) -> PartialDecryption:
    """Multiply one power by ``1 + n``: it still combines, to another plaintext."""
    numbers = from_matrix(partial.data)
    numbers[row] = numbers[row] * (1 + key.n) % key.n**2
    return dataclasses.replace(partial, data=to_matrix(numbers, partial.data.shape[1]))


def test_an_answer_that_a_helper_altered_is_refused_and_its_share_named(
    shares: list[KeyShare],
) -> None:
    total, _ = aggregate(shares)
    partials = [partial_decrypt(share, total) for share in shares[:3]]
    flipped = dataclasses.replace(partials[1], data=partials[1].data.copy())
    flipped.data[1, 5] ^= 1
    foreign = partial_decrypt(dataclasses.replace(shares[4], index=5), total)
    lied = dataclasses.replace(partials[1], data=foreign.data, proof=foreign.proof)
    unproven = dataclasses.replace(partials[1], proof=Proof(1, 2))
    negative = dataclasses.replace(partials[1], proof=Proof(1, -(2**90)))
    shift = shifted(partials[1], shares[0].public, 0)
    for bad in (flipped, lied, unproven, negative, shift):
        with pytest.raises(PartialError, match="share 2 is not proven") as caught:
            combine(shares[0], total, [partials[0], bad, partials[2]])
        assert caught.value.positions == (1,)


def test_a_helper_cannot_prove_a_power_that_it_did_not_compute(shares: list[KeyShare]) -> None:
    """The whole attack: multiply one power by 1 + n, and prove anew with the own share."""
    total, _ = aggregate(shares)
    honest = partial_decrypt(shares[1], total)
    bad = shifted(honest, shares[0].public, 0)
    scheme = Scheme(shares[0].public)
    statement = Statement(shares[1], 2, bad.digest, bad.data)
    bases = from_matrix(strip_messages(shares[0].public, total))
    proof = prove(scheme, statement, bases, from_matrix(bad.data))
    partials = [partial_decrypt(share, total) for share in (shares[0], shares[2])]
    with pytest.raises(PartialError, match="share 2"):
        combine(shares[0], total, [*partials, dataclasses.replace(bad, proof=proof)])


def test_a_server_that_sends_1_plus_n_as_the_stripped_ciphertext_gets_no_share(
    shares: list[KeyShare],
) -> None:
    """Of a share applied to 1 + n the whole share can be read: 1 + 2 D f(i) n modulo n^2."""
    total, _ = aggregate(shares)
    public, share = shares[0].public, shares[0]
    n, exponent = public.n, 2 * math.factorial(5) * share.value
    leaked = pow(1 + n, exponent, n * n)
    assert (leaked - 1) // n // (2 * math.factorial(5)) == share.value
    stripped = strip_messages(public, total)
    numbers = from_matrix(stripped)
    for element in (1 + n, numbers[0] * (1 + n) % (n * n), numbers[1], 2):
        chosen = stripped.copy()
        chosen[0] = to_matrix([element], stripped.shape[1])[0]
        with pytest.raises(CiphertextError, match="asks for this key share"):
            partial_decrypt(share, total, chosen)
    # Two wrong powers whose product is right do not pass either.
    pair = stripped.copy()
    inverse = pow(1 + n, -1, n * n)
    factors = (1 + n, inverse)
    pair[:2] = to_matrix([a * b % n**2 for a, b in zip(numbers, factors, strict=False)], 128)
    with pytest.raises(CiphertextError, match="asks for this key share"):
        partial_decrypt(share, total, pair)


def test_a_sign_in_the_stripped_ciphertexts_changes_nothing(shares: list[KeyShare]) -> None:
    total, mean = aggregate(shares)
    square = shares[0].public.n ** 2
    numbers = from_matrix(strip_messages(shares[0].public, total))
    negated = to_matrix([square - number for number in numbers], 128)
    partials = [partial_decrypt(share, total, negated) for share in shares[:3]]
    result = combine(shares[0], total, partials)
    assert np.abs(result - mean).max() <= LAYOUT.fixed_point.bound


def test_answers_of_another_dealing_are_refused() -> None:
    key = generate_keypair(256, insecure=True)
    ours, others = split(key, 2, 3), split(key, 2, 3)
    layout = Layout(10, 1.0, 16, 31, key_bits=256)
    total, _ = aggregate(ours, layout)
    partials = [partial_decrypt(ours[0], total), partial_decrypt(others[1], total)]
    with pytest.raises(PartialError, match="share 2 is not proven"):
        combine(ours[0], total, partials)


@pytest.mark.parametrize(
    "change",
    [
        {"index": "1"},
        {"index": None},
        {"response": "0x" + "f" * 9000},
        {"response": "deep"},
        {"digest": 5},
        {"threshold": 0},
    ],
)
def test_a_damaged_header_of_a_partial_decryption_is_refused(
    shares: list[KeyShare], change: dict[str, object]
) -> None:
    total, _ = aggregate(shares)
    partial = partial_decrypt(shares[0], total)
    assert PartialDecryption.from_header(partial.header(), partial.data).proof == partial.proof
    with pytest.raises(ThresholdError):
        PartialDecryption.from_header(partial.header() | change, partial.data)


def test_vectors_of_another_key_are_refused(shares: list[KeyShare], djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, np.zeros(70), LAYOUT)
    with pytest.raises(KeyMismatchError):
        partial_decrypt(shares[0], vector)
    total, _ = aggregate(shares)
    partial = dataclasses.replace(partial_decrypt(shares[0], total), key_id="another")
    others = [partial_decrypt(share, total) for share in shares[1:3]]
    with pytest.raises(PartialError, match="share 1 belongs to key another"):
        combine(shares[0], total, [partial, *others])


def test_vectors_of_another_degree_are_refused(shares: list[KeyShare]) -> None:
    vector, _ = encrypt(shares[0].public, np.zeros(70), dataclasses.replace(LAYOUT, degree=2))
    with pytest.raises(CiphertextError, match="dealt for 1: plan the layout with degree=1"):
        partial_decrypt(shares[0], vector)


@pytest.mark.parametrize(("threshold", "total"), [(1, 3), (4, 3), (0, 0), (2, 1001)])
def test_impossible_thresholds_are_refused(threshold: int, total: int) -> None:
    with pytest.raises(ThresholdError, match="not possible"):
        deal(threshold, total, 128, insecure=True)


def test_only_the_offered_sizes_are_dealt() -> None:
    with pytest.raises(PaillierError, match="not offered"):
        deal(2, 3, 512)


@pytest.mark.parametrize(("p", "q"), [(13, 23), (7, 47)])
def test_keys_of_ordinary_primes_are_not_split(p: int, q: int) -> None:
    """12 is not twice a prime; 6 is, but 3 is not above three shares."""
    with pytest.raises(PaillierError, match="cannot be split"):
        split(PrivateKey.from_primes(p, q, insecure=True), 2, 3)


def test_shares_survive_their_files(shares: list[KeyShare], tmp_path: Path) -> None:
    path = tmp_path / "share-2.pem"
    save_share(shares[1], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_share(path, insecure=True) == shares[1]
    assert str(shares[1].value) not in repr(shares[1])


def test_damaged_share_files_are_refused(shares: list[KeyShare], tmp_path: Path) -> None:
    path = tmp_path / "share.pem"
    path.write_text("nothing")
    path.chmod(0o600)
    with pytest.raises(PaillierError, match=r"share\.pem: expected a BRACT PAILLIER KEY SHARE"):
        read_share(path, insecure=True)
    with pytest.raises(ThresholdError, match="share 9 of 5"):
        dataclasses.replace(shares[0], index=9)
    cases: list[dict[str, Any]] = [
        {"value": shares[0].value ^ 1},
        {"index": 2},
        {"threshold": 2**30},
    ]
    for changed in cases:
        with pytest.raises(ThresholdError):
            dataclasses.replace(shares[0], **changed)
    with pytest.raises(ThresholdError, match="lacks a verification key"):
        dataclasses.replace(shares[0], verification=shares[0].verification[:-1])
    with pytest.raises(PaillierError):
        load_share(b"-----BEGIN BRACT PAILLIER KEY SHARE-----\n", insecure=True)
