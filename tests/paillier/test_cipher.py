import dataclasses
import json
import math
import secrets
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bract.paillier import (
    Layout,
    PaillierError,
    PrivateKey,
    decrypt,
    encrypt,
    generate_keypair,
    weighted_sum,
)
from bract.paillier.cipher import CipherVector
from bract.paillier.errors import CapacityError, CiphertextError, KeyMismatchError


def plan(length: int, **options: object) -> Layout:
    settings_ = {"clip": 1.0, "bits": 16, "max_weight": 31, "key_bits": 512} | options
    return Layout(length, **settings_)  # type: ignore[arg-type]


def naive_mean(
    key: PrivateKey, vectors: list[np.ndarray], weights: list[int], layout: Layout
) -> list[float]:
    """One value a ciphertext, textbook formulas, Python integers."""
    n, lam = key.public.n, math.lcm(key.p - 1, key.q - 1)
    levels = 2 ** (layout.bits - 1) - 1
    means = []
    for values in zip(*vectors, strict=True):
        product = 1
        for value, weight in zip(values, weights, strict=True):
            code = round(min(max(value, -layout.clip), layout.clip) * levels / layout.clip)
            r = 1 + secrets.randbelow(n - 1)
            c = pow(1 + n, code % n, n * n) * pow(r, n, n * n) % (n * n)
            product = product * pow(c, weight, n * n) % (n * n)
        total = (pow(product, lam, n * n) - 1) // n * pow(lam, -1, n) % n
        total = total - n if total > n // 2 else total
        means.append(total / sum(weights) * layout.clip / levels)
    return means


def test_fast_path_equals_one_value_at_a_time(djn_key: PrivateKey) -> None:
    rng = np.random.default_rng(1)
    vectors = [rng.normal(0, 0.7, 30) for _ in range(3)]
    layout = plan(30)
    encrypted = [encrypt(djn_key, v, layout)[0] for v in vectors]
    fast = decrypt(djn_key, weighted_sum(djn_key.public, encrypted, [5, 9, 17]))
    slow = naive_mean(djn_key, vectors, [5, 9, 17], layout)
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_aggregate_is_the_weighted_mean_within_the_bound(
    djn_key: PrivateKey, standard_key: PrivateKey, data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from([djn_key, standard_key]))
    clients = data.draw(st.integers(1, 7))
    weights = data.draw(
        st.lists(st.integers(0, 2**10), min_size=clients, max_size=clients).filter(any)
    )
    clip = data.draw(st.sampled_from([1e-4, 0.1, 1.0, 1000.0]))
    layout = plan(
        data.draw(st.integers(1, 120)),
        clip=clip,
        bits=data.draw(st.integers(2, 32)),
        max_weight=sum(weights) + data.draw(st.integers(0, 5)),
        degree=data.draw(st.integers(1, 3)),
    )
    element = st.one_of(
        st.sampled_from([0.0, clip, -clip, 5 * clip, -5 * clip]), st.floats(-clip, clip)
    )
    values = data.draw(hnp.arrays(np.float64, (clients, layout.length), elements=element))
    holder: Any = data.draw(st.sampled_from([key, key.public]))
    pairs = [encrypt(holder, row, layout, threads=1) for row in values]
    total = weighted_sum(key.public, [vector for vector, _ in pairs], weights, threads=1)
    assert [clipped for _, clipped in pairs] == [int((np.abs(row) > clip).sum()) for row in values]
    assert total.weight == sum(weights)
    mean = np.average(np.clip(values, -clip, clip), axis=0, weights=weights)
    error = np.abs(decrypt(key, total, threads=1) - mean)
    assert error.max() <= layout.fixed_point.bound


def test_sums_of_sums_carry_their_weight(djn_key: PrivateKey) -> None:
    layout = plan(3, max_weight=11)
    a, b, c = (encrypt(djn_key, [v, -v, 0.0], layout)[0] for v in (0.1, 0.4, 0.9))
    once = weighted_sum(djn_key.public, [a, b], [1, 3])
    twice = weighted_sum(djn_key.public, [once, c], [2, 3])
    assert (once.weight, twice.weight) == (4, 11)
    expected = (2 * 0.1 + 6 * 0.4 + 3 * 0.9) / 11
    bound = layout.fixed_point.bound
    np.testing.assert_allclose(decrypt(djn_key, twice), [expected, -expected, 0.0], atol=bound)
    np.testing.assert_allclose(
        decrypt(djn_key, weighted_sum(djn_key.public, [a, b], [1, 1])), [0.25, -0.25, 0], atol=bound
    )


def test_an_overflow_is_refused_before_it_happens(djn_key: PrivateKey) -> None:
    layout = plan(3, max_weight=4)
    vector, _ = encrypt(djn_key, [1.0, 1.0, 1.0], layout)
    full = weighted_sum(djn_key.public, [vector, vector], [2, 2])
    assert decrypt(djn_key, full) == pytest.approx([1.0, 1.0, 1.0])
    with pytest.raises(CapacityError, match="sum to 5"):
        weighted_sum(djn_key.public, [vector, vector], [2, 3])
    with pytest.raises(CapacityError, match="sum to 5"):
        weighted_sum(djn_key.public, [full, vector], [1, 1])


def test_one_2048_bit_key_end_to_end() -> None:
    key = generate_keypair(2048)
    rng = np.random.default_rng(0)
    layout = Layout(500, 0.1, 16, 3)
    values = rng.normal(0, 0.05, (3, 500))
    vectors = [encrypt(key.public, row, layout)[0] for row in values]
    mean = decrypt(key, weighted_sum(key.public, vectors, [1, 1, 1]))
    assert np.abs(mean - np.clip(values, -0.1, 0.1).mean(0)).max() <= layout.fixed_point.bound
    plaintext = key.to_phe().raw_decrypt(int.from_bytes(vectors[0].data[0].tobytes(), "big"))
    assert plaintext == layout.pack(layout.fixed_point.encode(values[0])[0])[0]


def test_the_key_of_another_run_is_refused(djn_key: PrivateKey, other_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, [0.5], plan(1))
    with pytest.raises(KeyMismatchError, match=other_key.public.key_id):
        decrypt(other_key, vector)
    with pytest.raises(KeyMismatchError, match=djn_key.public.key_id):
        weighted_sum(other_key.public, [vector], [1])


def test_a_key_of_another_size_is_refused(djn_key: PrivateKey) -> None:
    with pytest.raises(KeyMismatchError, match="layout is for keys of 2048 bits"):
        encrypt(djn_key, [0.5], plan(1, key_bits=2048))


def test_a_foreign_ciphertext_under_this_key_id_is_refused(
    djn_key: PrivateKey, other_key: PrivateKey
) -> None:
    foreign, _ = encrypt(other_key, np.zeros(50), plan(50))
    forged = dataclasses.replace(foreign, key_id=djn_key.public.key_id)
    with pytest.raises(CiphertextError):
        decrypt(djn_key, forged)


@pytest.mark.parametrize("name", ["djn_key", "standard_key"])
def test_an_altered_byte_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    key = request.getfixturevalue(name)
    vector, _ = encrypt(key, np.linspace(-1, 1, 60), plan(60, max_weight=3))
    data = vector.data.copy()
    data[1, 20] ^= 4
    with pytest.raises(CiphertextError, match="ciphertext 1"):
        decrypt(key, dataclasses.replace(vector, data=data))


def test_truncated_matrices_are_refused(djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, np.zeros(100), plan(100))
    data: Any
    for data in (vector.data[:-1], vector.data[:, :-1], vector.data.astype(np.int16)):
        with pytest.raises(CiphertextError, match="expected uint8 ciphertexts of shape"):
            dataclasses.replace(vector, data=data)


@pytest.mark.parametrize("fill", [0, 255])
def test_numbers_out_of_range_are_refused(djn_key: PrivateKey, fill: int) -> None:
    vector, _ = encrypt(djn_key, np.zeros(100), plan(100))
    vector.data[2] = fill
    with pytest.raises(CiphertextError, match="ciphertext 2 is out of range"):
        weighted_sum(djn_key.public, [vector], [1], threads=1)
    with pytest.raises(CiphertextError, match="ciphertext 2 is out of range"):
        decrypt(djn_key, vector, threads=2)


def test_a_wrong_weight_is_refused(djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, np.ones(10), plan(10))
    total = weighted_sum(djn_key.public, [vector, vector], [3, 4])
    with pytest.raises(CiphertextError, match="total weight 2 cannot give"):
        decrypt(djn_key, dataclasses.replace(total, weight=2, parts=()))
    with pytest.raises(CiphertextError, match="outside 1 to 31"):
        dataclasses.replace(total, weight=32)


def test_layouts_are_not_mixed(djn_key: PrivateKey) -> None:
    left, _ = encrypt(djn_key, [0.5], plan(1))
    right, _ = encrypt(djn_key, [0.5], plan(1, clip=2.0))
    with pytest.raises(CiphertextError, match="vector 1 has the layout"):
        weighted_sum(djn_key.public, [left, right], [1, 1])


def test_vectors_and_weights_pair_up(djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, [0.5], plan(1))
    with pytest.raises(PaillierError, match="1 vectors and 2 weights"):
        weighted_sum(djn_key.public, [vector], [1, 1])


def test_nan_never_reaches_a_ciphertext(djn_key: PrivateKey) -> None:
    with pytest.raises(PaillierError, match="NaN"):
        encrypt(djn_key, [0.0, float("nan")], plan(2))


def test_standard_parts_make_a_standard_sum(djn_key: PrivateKey) -> None:
    layout = plan(5)
    short, _ = encrypt(djn_key, np.full(5, 0.5), layout)
    full, _ = encrypt(djn_key, np.full(5, 0.1), layout, randomness="standard")
    total = weighted_sum(djn_key.public, [short, full], [1, 1])
    assert (short.randomness, full.randomness, total.randomness) == ("djn", "standard", "standard")
    np.testing.assert_allclose(decrypt(djn_key, total), 0.3, atol=layout.fixed_point.bound)
    with pytest.raises(CiphertextError, match="standard randomness and did not say so"):
        decrypt(djn_key, dataclasses.replace(full, randomness="djn"))


def test_a_vector_survives_its_header(djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, np.linspace(-1, 1, 70), plan(70, degree=2))
    header = json.loads(json.dumps(vector.header()))
    again = CipherVector.from_header(header, vector.data)
    assert again.header() == vector.header()
    np.testing.assert_array_equal(decrypt(djn_key, again), decrypt(djn_key, vector))


@pytest.mark.parametrize("change", [{"layout": {}}, {"extra": 1}, {"randomness": "none"}])
def test_damaged_headers_are_refused(djn_key: PrivateKey, change: dict[str, object]) -> None:
    vector, _ = encrypt(djn_key, [0.5], plan(1))
    with pytest.raises(PaillierError):
        CipherVector.from_header(vector.header() | change, vector.data)


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_ends_at_the_number_of_ciphertexts(djn_key: PrivateKey, threads: int) -> None:
    layout = plan(5000)
    seen: list[tuple[int, int]] = []
    vector, _ = encrypt(
        djn_key, np.zeros(5000), layout, threads=threads, progress=lambda *step: seen.append(step)
    )
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (layout.rows, layout.rows)
    assert np.abs(decrypt(djn_key, vector, threads=threads)).max() == 0


def test_threads_below_one_are_refused(djn_key: PrivateKey) -> None:
    vector, _ = encrypt(djn_key, [0.5], plan(1))
    with pytest.raises(ValueError, match="at least 1"):
        decrypt(djn_key, vector, threads=0)
