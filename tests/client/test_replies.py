import hashlib

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from bract.client.replies import digest, pieces, unpack
from bract.protocol.arrays import to_arrays


def content() -> RecordDict:
    return RecordDict(
        {
            "update": to_arrays({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}),
            "metrics": MetricRecord({"loss": 0.5}),
            "config": ConfigRecord({"key": b"\x00\xff"}),
        }
    )


def test_a_digest_is_that_of_the_whole_content() -> None:
    assert digest(content()) == hashlib.sha256(b"".join(pieces(content(), ""))).hexdigest()
    assert unpack(b"".join(pieces(content(), "a")), "a") == content()


def test_the_arrays_of_a_reply_are_written_without_a_copy() -> None:
    held = content()
    arrays = [array.data for array in held.array_records["update"].values()]
    found = list(pieces(held, "a"))[1:]
    assert all(piece is data for piece, data in zip(found, arrays, strict=True))
