import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bract.paillier import Layout, PaillierError
from bract.paillier.errors import CapacityError, CiphertextError
from bract.paillier.quantize import FixedPoint


def slow_pack(codes: list[int], layout: Layout) -> list[int]:
    rows = [codes[k : k + layout.slots] for k in range(0, len(codes), layout.slots)]
    return [sum(c << (slot * layout.slot_bits) for slot, c in enumerate(row)) for row in rows]


def test_codes_worked_by_hand() -> None:
    """4 bits: 7 levels, step 0.1 for a clip of 0.7; 0.24 -> 2.4 -> 2 -> code 9."""
    codes, clipped = FixedPoint(0.7, 4).encode([-5.0, -0.7, 0.0, 0.24, 0.7, 0.71])
    assert codes.tolist() == [0, 0, 7, 9, 14, 14]
    assert clipped == 2


def test_decoding_worked_by_hand() -> None:
    """Weights 1 and 2 on codes 9 and 6: sum 21 = 3 * 7 + 0, so the mean is 0."""
    assert FixedPoint(0.7, 4).decode(np.array([9 + 2 * 6, 42], np.uint64), 3) == pytest.approx(
        [0.0, 0.7]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_without_a_number_are_refused(bad: float) -> None:
    with pytest.raises(PaillierError, match=r"1 of 3 values.*the first at 1"):
        FixedPoint(1.0).encode([0.0, bad, 0.0])


@pytest.mark.parametrize(
    ("clip", "bits"), [(0.0, 16), (-1.0, 16), (np.inf, 16), (1.0, 1), (1.0, 33)]
)
def test_impossible_fixed_points_are_refused(clip: float, bits: int) -> None:
    with pytest.raises(PaillierError, match="found"):
        FixedPoint(clip, bits)


@given(
    st.integers(2, 32),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
)
def test_one_code_is_within_half_a_step(bits: int, clip: float, values: list[float]) -> None:
    point = FixedPoint(clip, bits)
    codes, clipped = point.encode(values)
    error = np.abs(point.decode(codes, 1) - np.clip(values, -clip, clip))
    assert error.max() <= point.bound
    assert clipped == sum(abs(v) > clip for v in values)


@given(st.data())
def test_packing_equals_shifting_one_code_at_a_time(data: st.DataObject) -> None:
    bits = data.draw(st.integers(2, 32))
    layout = Layout(
        data.draw(st.integers(1, 200)),
        1.0,
        bits,
        data.draw(st.integers(1, 2 ** (60 - bits) // 4)),
        data.draw(st.sampled_from([128, 257, 512])),
        data.draw(st.integers(1, 3)),
    )
    weight = data.draw(st.integers(1, layout.max_weight))
    top = 2**bits - 2
    codes = data.draw(st.lists(st.integers(0, top), min_size=layout.length, max_size=layout.length))
    packed = layout.pack(np.array(codes, np.uint64))
    assert packed == slow_pack(codes, layout)
    sums = layout.unpack([weight * m for m in packed], weight)
    assert sums.tolist() == [weight * c for c in codes]


def test_the_largest_sum_fills_its_slot_and_leaves_its_neighbours() -> None:
    for max_weight in (1, 2, 3, 7, 8, 31, 32, 33):
        layout = Layout(6, 1.0, 8, max_weight, 128)
        codes = np.array([254, 0, 254, 0, 0, 254], np.uint64)
        assert max_weight * 254 < 2**layout.slot_bits <= max_weight * 254 * 2
        sums = layout.unpack([max_weight * m for m in layout.pack(codes)], max_weight)
        assert sums.tolist() == [max_weight * int(c) for c in codes]


def test_sixteen_bits_with_weights_up_to_31_cost_less_than_five_and_a_half_bytes() -> None:
    layout = Layout(61_706, 1.0, 16, 31)
    assert (layout.slot_bits, layout.slots) == (21, 97)
    assert layout.rows * layout.cipher_bytes / layout.length < 5.5


def test_an_impossible_plan_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"32 bits a value.*2147483648 need slots of 63 bits"):
        Layout(10, 1.0, 32, 2**31)
    with pytest.raises(CapacityError, match="15 is the most: take at most 12 bits"):
        Layout(10, 1.0, 16, 4, key_bits=16)


def test_weights_beyond_the_plan_are_refused_with_the_numbers() -> None:
    layout = Layout(10, 1.0, 16, 31)
    assert layout.require([10, 21]) == 31
    with pytest.raises(CapacityError, match=r"2 weights sum to 32.*at most 31.*max_weight=32"):
        layout.require([10, 22])
    for weights in ([], [0, 0], [3, -1]):
        with pytest.raises(PaillierError, match="non-negative"):
            layout.require(weights)


def test_implausible_plaintexts_are_refused() -> None:
    layout = Layout(10, 1.0, 16, 3, 128)
    codes = np.full(10, 100, np.uint64)
    packed = layout.pack(codes)
    for wrong in (1 << 126, packed[1] + (65534 + 1), packed[1] + (1 << (layout.slot_bits * 6))):
        with pytest.raises(CiphertextError, match="ciphertext 1 decrypts to sums"):
            layout.unpack([packed[0], wrong], 1)
    with pytest.raises(CiphertextError, match="expected 2 plaintexts"):
        layout.unpack(packed[:1], 1)


def test_codes_that_do_not_fit_the_plan_are_refused() -> None:
    layout = Layout(3, 1.0, 4, 1, 128)
    with pytest.raises(PaillierError, match="exceeds 14"):
        layout.pack(np.array([0, 15, 0], np.uint64))
    with pytest.raises(PaillierError, match="expected 3 codes"):
        layout.pack(np.zeros(4, np.uint64))
