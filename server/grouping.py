"""Sort the tensors of a reply into the groups of an observation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict

from bract.errors import BractError, one_line
from bract.protocol.arrays import view_arrays
from bract.protocol.reading import Reading, buffers_of
from bract.protocol.records import ARRAYS, DEFENSES, Contribution, split_state
from bract.updates.update import Tensors


def groups_of_reply(request: Message, answer: Contribution) -> dict[str, Tensors]:
    """Return the tensors of an observation of bract's own client."""
    if answer.ciphertexts:
        # All the server has sent in plain is the initial model, to clients that had none yet.
        sent = request.content.array_records.get(ARRAYS)
        parameters, buffers = split_state(view_arrays(sent) if sent else {})
        return {
            "parameters": parameters,
            "buffers": buffers,
            "update": {},
            "ciphertexts": answer.ciphertexts,
        }
    arrays = view_arrays(request.content.array_records[ARRAYS])
    return {
        "parameters": {n: v for n, v in arrays.items() if n in answer.update},
        "buffers": {n: v for n, v in arrays.items() if n not in answer.update},
        "update": answer.update,
        "returned_buffers": answer.buffers,
    }


def groups_of_reading(reading: Reading, known: set[str]) -> dict[str, Tensors]:
    """Return the tensors of an observation of an app of its own.

    Names of integers are added to ``known``: an average of them comes back as floating numbers.
    """
    known |= {
        name
        for held in (reading.sent, reading.returned)
        for name, value in held.items()
        if not value.is_floating_point()
    }
    buffers = buffers_of(reading, known)
    names = [name for name in reading.returned if name not in buffers]
    if not names:
        raise BractError(
            f"its record {reading.record!r} holds no parameters but buffers alone",
            code="update-refused",
        )
    weights = reading.kind == "weights"
    _, extra = split_state(reading.extra)
    returned = {name: v for name, v in reading.returned.items() if name in buffers} | extra
    return {
        "parameters": {name: reading.sent[name] for name in names},
        "buffers": {n: v for n, v in reading.sent.items() if n in buffers} | reading.absent,
        "update": reading.update(names),
        "returned_buffers": returned if weights else {},
    }


def described(reading: Reading, content: RecordDict, previous: int | None) -> dict[str, Any]:
    """Return the fields of an `UploadReading`, within its bounds."""
    return {
        "record": _short(reading.record),
        "update": reading.kind,
        "source": reading.source,
        "cosine": reading.cosine,
        "matched": reading.matched,
        "absent": _names_of(reading.absent),
        "extra": _names_of(reading.extra),
        "unlike": _names_of(reading.unlike),
        "previous": previous,
        "left_out": _left_out(reading, content)[:1000],
    }


def _left_out(reading: Reading, content: RecordDict) -> list[dict[str, Any]]:
    """List what a reply holds besides the record that was taken."""
    arrays = [
        {
            "kind": "arrays",
            "record": _short(key),
            "values": sum(math.prod(array.shape) for array in content.array_records[key].values()),
        }
        for key in reading.left_out
    ]
    others = [
        {"kind": kind, "record": _short(key), "name": _short(name), "values": _size(value)}
        for kind, records in (
            ("metrics", content.metric_records),
            ("config", content.config_records),
        )
        for key, record in records.items()
        if key != DEFENSES
        for name, value in record.items()
    ]
    return arrays + others


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list) else 1


def _short(name: str) -> str:
    return one_line(name, 200)


def _names_of(names: Iterable[str]) -> list[str]:
    return [_short(name) for name in names][:1000]
