import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from safetensors.torch import save

from bract.errors import BractError
from bract.protocol import arrays
from bract.protocol.arrays import PACKED, from_arrays, to_arrays, to_packed, view_arrays


def serialised(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=True)
    return stream.getvalue()


def header(text: str) -> bytes:
    body = text.encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def record(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    return ArrayRecord({"w": Array("float32", (1,), stype, data)})


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1, 255], dtype=torch.uint8),
        torch.tensor([1.5], dtype=torch.float16),
        torch.tensor([[1.5, -3e38]], dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.bfloat16),
    ],
)
def test_tensors_come_back_as_they_were_and_may_be_changed(value: Any) -> None:
    back = from_arrays(to_arrays({"w": value}))["w"]
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)
    back.fill_(0)


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("bfloat16", (2,), b"123"),
        ("bfloat16", (-1, -2), b"1234"),
        ("bfloat16", (True,), b"12"),
        ("float32", (2,), b"1234"),
        ("bfloat16", (10**13,), b""),
    ],
)
def test_what_is_no_bfloat16_is_refused_by_name(dtype: Any, shape: Any, data: Any) -> None:
    bad = ArrayRecord({"w": Array(dtype, shape, arrays.BFLOAT16, data)})
    with refused("message-malformed", "w"):
        from_arrays(bad)


def test_columns_first_is_read_as_flower_reads_it() -> None:
    array = Array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert from_arrays(ArrayRecord({"w": array}))["w"].tolist() == array.numpy().tolist()


WHOLE = serialised(np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("data", "stype", "words"),
    [
        (WHOLE, "x", ("message-malformed", "x")),
        (b"", "numpy.ndarray", ("message-malformed",)),
        (WHOLE[:-1], "numpy.ndarray", ("message-malformed", "16", "15")),
        (WHOLE + b"0", "numpy.ndarray", ("message-malformed", "16", "17")),
        (WHOLE[:20], "numpy.ndarray", ("message-malformed",)),
        (b"PK\x03\x04" + b"0" * 60, "numpy.ndarray", ("message-malformed",)),
        (serialised(np.array([{}], dtype=object)), "numpy.ndarray", ("message-malformed", "dtype")),
        (serialised(np.array(["a"])), "numpy.ndarray", ("message-malformed",)),
        (serialised(np.zeros(2, [("a", "f4")])), "numpy.ndarray", ("message-malformed",)),
        (serialised(np.zeros(2, ">f4")), "numpy.ndarray", ("message-malformed", ">f4")),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}"),
            "numpy.ndarray",
            ("message-malformed", "40000000000000", "0"),
        ),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}") + b"0" * 16,
            "numpy.ndarray",
            ("message-malformed", "0"),
        ),
        (header("(" * 110), "numpy.ndarray", ("message-malformed",)),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(
    data: Any, stype: Any, words: tuple[str, ...]
) -> None:
    with refused(*words) as caught:
        from_arrays(record(data, stype))
    assert str(caught.value).startswith("array 'w' cannot be decoded")


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), cut=st.integers(0, len(WHOLE)), keep=st.booleans())
def test_no_bytes_raise_anything_but_a_bract_error(data: Any, cut: Any, keep: Any) -> None:
    for candidate in (data, WHOLE[:cut] + data + (WHOLE[cut:] if keep else b"")):
        try:
            from_arrays(record(candidate))
        except BractError:
            continue


MIXED = {
    "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "count": torch.tensor(7),
    "b": torch.tensor([0.5, -1.0]),
    "empty": torch.zeros(0, 3),
    "double": torch.tensor([[1e-300]], dtype=torch.float64),
    "truth": torch.tensor([True, False]),
}


def test_packed_tensors_are_read_as_they_were_written() -> None:
    record = to_packed(MIXED)
    kinds = {"float32", "int64", "float64", "bool"}
    assert set(record) == {PACKED, *(f"{PACKED}.{kind}" for kind in kinds)}
    found = from_arrays(record)
    assert list(found) == list(MIXED)
    for name, value in MIXED.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert bool((found[name] == value).all())
    save(found)  # refuses tensors that share a storage


@pytest.mark.parametrize("write", [to_arrays, to_packed])
def test_a_view_of_arrays_is_what_they_are_read_as_without_a_copy(write: Any) -> None:
    tensors = {f"w{i}": torch.arange(6.0 + i).reshape(-1, 1) for i in range(4)}
    record = write(tensors)
    read, seen = from_arrays(record), view_arrays(record)
    assert list(seen) == list(read)
    held = [np.frombuffer(array.data, dtype=np.uint8) for array in record.values()]
    for name, value in read.items():
        assert torch.equal(seen[name], value) and torch.equal(value, tensors[name])
        assert any(np.shares_memory(seen[name].numpy(), data) for data in held)
        assert not any(np.shares_memory(value.numpy(), data) for data in held)


def test_large_tensors_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their packed copy would take as much memory again."""
    tensors = {name: torch.ones(10) for name in "abc"}
    assert PACKED in to_packed(tensors)
    monkeypatch.setattr(arrays, "MOST_PACKED", 119)
    assert list(to_packed(tensors)) == list("abc")


def test_few_tensors_are_not_packed() -> None:
    assert set(to_packed({"w": torch.zeros(2), "b": torch.zeros(1)})) == {"w", "b"}


def described(*entries: Any) -> Array:
    return Array(np.frombuffer(json.dumps(entries).encode(), dtype=np.uint8))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (described(["w", "float32", [7]]), "6 values of float32 where 7 are described"),
        (described(["w", "float32", [5]]), "more values than it describes"),
        (described(["w", "float32", [2, 3]], ["w", "float32", [0]]), "without a name of its own"),
        (described(["w", "float64", [6]]), "bract.packed.float64"),
        (described(["w", "float32", [-1]]), "shape"),
        (described(["w", "float32", [10**18]]), "are described"),
        (described(["w", "float32", [10**30]]), "64 bits"),
        (described(["w", "float32"]), "not enough values"),
        (described([1, "float32", [6]]), "without a name"),
        (described(["\ud800", "float32", [6]]), "surrogates not allowed"),
        (Array(np.frombuffer(b"[[", dtype=np.uint8)), "packed arrays cannot be cut"),
        (Array(np.frombuffer(b"7", dtype=np.uint8)), "packed arrays cannot be cut"),
    ],
)
def test_a_damaged_description_is_refused_in_one_line(header: Array, message: str) -> None:
    record = ArrayRecord(
        {PACKED: header, f"{PACKED}.float32": Array(np.zeros(6, dtype=np.float32))}
    )
    with refused("message-malformed", "packed") as caught:
        from_arrays(record)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (2, 3)])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_an_array_has_the_bytes_that_numpy_writes(
    shape: tuple[int, ...], kind: torch.dtype
) -> None:
    value = (torch.rand(shape) * 9).to(kind)
    found, usual = to_arrays({"w": value})["w"], Array(value.numpy())
    assert (found.data, found.dtype, found.shape, found.stype) == (
        usual.data,
        usual.dtype,
        usual.shape,
        usual.stype,
    )
    turned = value.mT if value.ndim == 2 else value
    packed = to_packed({"a": value, "b": turned, "c": value})[f"bract.packed.{found.dtype}"]
    flat = np.concatenate([v.numpy().reshape(-1) for v in (value, turned, value)])
    assert packed.data == Array(flat).data
