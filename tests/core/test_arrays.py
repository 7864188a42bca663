import io
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from bract.errors import BractError
from bract.protocol.arrays import from_arrays, to_arrays


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
    ],
)
def test_tensors_come_back_as_they_were_and_may_be_changed(value: Any) -> None:
    back = from_arrays(to_arrays({"w": value}))["w"]
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)
    back.fill_(0)


def test_columns_first_is_read_as_flower_reads_it() -> None:
    array = Array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert from_arrays(ArrayRecord({"w": array}))["w"].tolist() == array.numpy().tolist()


WHOLE = serialised(np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("data", "stype", "words"),
    [
        (WHOLE, "x", "its serialisation is 'x'"),
        (b"", "numpy.ndarray", "cannot be decoded"),
        (WHOLE[:-1], "numpy.ndarray", "takes 16 bytes, it holds 15"),
        (WHOLE + b"0", "numpy.ndarray", "takes 16 bytes, it holds 17"),
        (WHOLE[:20], "numpy.ndarray", "cannot be decoded"),
        (b"PK\x03\x04" + b"0" * 60, "numpy.ndarray", "magic string"),
        (serialised(np.array([{}], dtype=object)), "numpy.ndarray", "dtype object"),
        (serialised(np.array(["a"])), "numpy.ndarray", "expected numbers"),
        (serialised(np.zeros(2, [("a", "f4")])), "numpy.ndarray", "expected numbers"),
        (serialised(np.zeros(2, ">f4")), "numpy.ndarray", "byte order"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}"),
            "numpy.ndarray",
            "takes 40000000000000 bytes, it holds 0",
        ),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}") + b"0" * 16,
            "numpy.ndarray",
            "sides from 0",
        ),
        (header("(" * 110), "numpy.ndarray", "cannot be decoded"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(data: Any, stype: Any, words: Any) -> None:
    with pytest.raises(BractError, match=words) as caught:
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
