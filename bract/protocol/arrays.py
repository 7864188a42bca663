"""Tensors as Flower arrays, and back: untrusted arrays are checked before they are decoded."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from tokenize import TokenError
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from bract.errors import BractError, one_line
from bract.parse.strict_json import parse_json
from bract.protocol.spooling import SpooledArray
from bract.updates.update import Tensors

_STYPE = "numpy.ndarray"
_MOST_HEADER = 1 << 17
"""Bytes of an array's header at most; numpy refuses to parse a tenth of that."""

PACKED = "bract.packed"
"""Array that describes the others of a packed record: JSON, ``[[name, dtype, shape], ...]``."""

FEWEST_PACKED = 3
"""Tensors from which on packing them sends fewer arrays."""

MOST_PACKED = 1 << 28
"""Bytes of tensors up to which they are packed: the time of an array no longer counts for larger
ones, and their packed copy would."""

_PACKED = f"{PACKED}."
_MOST_DESCRIPTION = 1 << 20
"""Bytes of a packed record's description: that of some ten thousand tensors."""

BFLOAT16 = "bfloat16"
"""dtype and serialisation of an array of bfloat16, which numpy has no name for: the values'
bytes alone, least significant first."""

_KINDS = "biufc"
"""numpy's kinds of numbers: truth values, integers, floating and complex ones."""

_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    BractError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TokenError,  # numpy reads a header that is no literal once more, token by token
    TypeError,
    ValueError,
)


def to_arrays(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    """Write tensors, or pairs of name and tensor, to an array record in their order."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return ArrayRecord({name: _one(value) for name, value in pairs})


def _one(value: Tensor) -> Array:
    kind, values = _values(value)
    return _array(kind, [values])


def _values(value: Tensor) -> tuple[str, NDArray[Any]]:
    """Return the dtype's name and the values; those of bfloat16 as int16 of the same bits."""
    own = value.detach().cpu().contiguous()
    if own.dtype == torch.bfloat16:
        return BFLOAT16, own.view(torch.int16).numpy()
    found = own.numpy()
    return str(found.dtype), found


def _array(kind: str, parts: Sequence[NDArray[Any]]) -> Array:
    """Return one array of one part, or of the values of several; each is copied once."""
    shape = parts[0].shape if len(parts) == 1 else (sum(part.size for part in parts),)
    little = "<i2" if kind == BFLOAT16 else parts[0].dtype
    flat = (np.ascontiguousarray(part, little).reshape(-1) for part in parts)
    contents = [memoryview(cast(Any, values.view(np.uint8))) for values in flat]
    if kind == BFLOAT16:
        return Array(BFLOAT16, shape, stype=BFLOAT16, data=b"".join(contents))
    head = io.BytesIO()
    described = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    data = b"".join([head.getvalue(), *contents])
    return Array(kind, shape, stype=_STYPE, data=data)


def to_packed(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Write tensors to an array record of one array for each dtype, and one that describes them.

    Flower sends every array as messages of its own, so that the hundred arrays of a ResNet-20 take
    seconds where one takes milliseconds. `from_arrays` reads both forms; only who is known to
    call it may be sent this one. Few tensors, those of more than `MOST_PACKED` bytes, and so many
    that a reader would refuse their description, are written as `to_arrays` does.
    """
    if sum(value.nbytes for value in tensors.values()) > MOST_PACKED:
        return to_arrays(tensors)
    values = {name: _values(value) for name, value in tensors.items()}
    described = [[name, kind, list(value.shape)] for name, (kind, value) in values.items()]
    header = np.frombuffer(json.dumps(described).encode(), dtype=np.uint8)
    if len(tensors) < FEWEST_PACKED or header.size > _MOST_DESCRIPTION:
        return to_arrays(tensors)
    flat = {}
    for kind in dict.fromkeys(kind for kind, _ in values.values()):
        flat[_PACKED + kind] = _array(
            kind, [v.reshape(-1) for own, v in values.values() if own == kind]
        )
    return ArrayRecord({PACKED: Array(header), **flat})


def from_arrays(record: ArrayRecord) -> Tensors:
    """Read an array record to tensors on the CPU, as `to_arrays` or `to_packed` wrote it.

    Raises
    ------
    BractError
        If an array is no serialised numpy array of numbers, or holds more or fewer bytes than its
        header declares; the message names the array. No more memory is taken than the data fills.
    """
    tensors = {name: _decode(name, array) for name, array in record.items()}
    return _unpacked(tensors) if PACKED in tensors else tensors


def view_arrays(record: ArrayRecord) -> Tensors:
    """Read an array record as `from_arrays` does, without a copy: for reading alone.

    The tensors are the record's own bytes, which nothing may change.
    """
    tensors = {name: _decode(name, array, copy=False) for name, array in record.items()}
    return _unpacked(tensors) if PACKED in tensors else tensors


def _unpacked(flat: Tensors) -> Tensors:
    """Cut the arrays of `to_packed` into tensors; each has a storage of its own."""
    try:
        described = parse_json(flat[PACKED].numpy().tobytes(), most=_MOST_DESCRIPTION)
        left = {name: _values(value) for name, value in flat.items() if name != PACKED}
        taken = dict.fromkeys(left, 0)
        tensors: Tensors = {}
        for name, kind, shape in described:
            (held, source), start = left[_PACKED + kind], taken[_PACKED + kind]
            if not isinstance(name, str) or name in tensors or source.ndim != 1:
                raise ValueError("a tensor without a name of its own, or values in no row")
            name.encode()  # no half of a surrogate pair, which no file takes as a name
            if not all(type(side) is int and side >= 0 for side in shape):
                raise ValueError(f"shape {shape}, expected sides from 0")
            end = start + math.prod(shape)
            if held != kind or end > len(source):
                raise ValueError(f"{len(source)} values of {held} where {end} are described")
            value = torch.from_numpy(source[start:end].reshape(shape))
            tensors[name] = value.view(torch.bfloat16) if kind == BFLOAT16 else value
            taken[_PACKED + kind] = end
        if any(taken[name] != len(value) for name, (_, value) in left.items()):
            raise ValueError("more values than it describes")
    except _UNREADABLE as error:
        reason = one_line(error, 200) or type(error).__name__
        raise BractError(
            f"packed arrays cannot be cut: {reason}", code="message-malformed"
        ) from None
    return tensors


def _decode(name: str, array: Array, *, copy: bool = True) -> Tensor:
    try:
        held = array.content if isinstance(array, SpooledArray) else array.data
        if array.stype == BFLOAT16:
            return _bfloat16(array, held, copy=copy)
        if array.stype != _STYPE:
            raise ValueError(f"its serialisation is {array.stype!r}, expected {_STYPE!r}")
        return _tensor(held, copy=copy)
    except _UNREADABLE as error:
        reason = one_line(error, 200) or type(error).__name__
        raise BractError(
            f"array {one_line(repr(name), 100)} cannot be decoded: {reason}",
            code="message-malformed",
        ) from None


def _bfloat16(array: Array, data: bytes | NDArray[np.uint8], *, copy: bool) -> Tensor:
    shape = tuple(array.shape)
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"shape {shape}, expected sides from 0")
    needed = 2 * math.prod(shape)
    if array.dtype != BFLOAT16 or len(data) != needed:
        raise ValueError(f"{BFLOAT16} {shape} takes {needed} bytes, it holds {len(data)}")
    buffer = bytearray(data) if copy and isinstance(data, bytes) else data
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable")
        values = np.frombuffer(buffer, dtype="<i2").astype(np.int16, copy=False)
        return torch.from_numpy(values.reshape(shape)).view(torch.bfloat16)


def _tensor(data: bytes | NDArray[np.uint8], *, copy: bool) -> Tensor:
    """Decode numpy's format 1.0 or 2.0. `numpy.load` would allocate what the header claims.

    Bytes are copied, if at all; what is mapped from a file stays there.
    """
    stream = io.BytesIO(bytes(data[:_MOST_HEADER]))
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"numpy format {version}, expected 1.0 or 2.0")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.kind not in _KINDS or not dtype.isnative:
        raise ValueError(f"dtype {dtype}, expected numbers in this machine's byte order")
    if not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"shape {shape}, expected sides from 0")
    content = memoryview(cast(Any, data))[stream.tell() :]
    needed = math.prod(shape) * dtype.itemsize
    if len(content) != needed:
        raise ValueError(f"{dtype} {shape} takes {needed} bytes, it holds {len(content)}")
    buffer = bytearray(content) if copy and isinstance(data, bytes) else content
    value = np.ndarray(shape, dtype, buffer=buffer, order="F" if fortran else "C")
    with warnings.catch_warnings():
        # Of memory that may not be written; `view_arrays` says so.
        warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(value).contiguous()
