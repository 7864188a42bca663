"""The content of a message as bytes: to compare it, and to keep a reply that may be sent again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from bract.errors import BractError, one_line
from bract.parse.strict_json import parse_json

_MOST_HEADER = 1 << 26


def digest(content: RecordDict) -> str:
    """Return the SHA-256 of all records: names, values, dtypes and shapes, in their order."""
    found = hashlib.sha256()
    for piece in pieces(content, ""):
        found.update(piece)
    return found.hexdigest()


def pieces(content: RecordDict, label: str) -> Iterator[bytes]:
    """Write ``content`` and a ``label``: a JSON header of stated length, then the arrays' bytes.

    The bytes of a large model are given as they are, without a copy.
    """
    records: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = [
                [key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()
            ]
            records.append({"name": name, "kind": "arrays", "values": arrays})
            blocks += [array.data for array in record.values()]
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            values = [[key, _to_json(value)] for key, value in record.items()]
            records.append({"name": name, "kind": kind, "values": values})
    header = json.dumps({"label": label, "records": records}).encode()
    yield len(header).to_bytes(8, "big") + header
    yield from blocks


def unpack(data: bytes, label: str) -> RecordDict | None:
    """Read what `pack` wrote; None where its label is another one."""
    start = 8 + int.from_bytes(data[:8], "big")
    try:
        header = parse_json(data[8:start], most=_MOST_HEADER, constants=True)
        if header["label"] != label:
            return None
        content = RecordDict()
        for record in header["records"]:
            name, kind, values = record["name"], record["kind"], record["values"]
            if kind == "arrays":
                arrays = {}
                for key, dtype, shape, stype, length in values:
                    block = data[start : start + length]
                    if len(block) != length:
                        raise ValueError("it ends too early")
                    arrays[key] = Array(dtype, tuple(shape), stype=stype, data=block)
                    start += length
                content[name] = ArrayRecord(arrays)
            else:
                restored = {key: _from_json(value) for key, value in values}
                content[name] = (MetricRecord if kind == "metrics" else ConfigRecord)(restored)
    except (
        BractError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise BractError(
            f"a reply that was kept is damaged ({one_line(error, 200)}); remove it",
            code="file-damaged",
        ) from error
    return content


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list) and any(isinstance(item, bytes) for item in value):
        return {"hexes": [item.hex() for item in value]}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if "hex" in value:
            return bytes.fromhex(value["hex"])
        return [bytes.fromhex(item) for item in value["hexes"]]
    return value
