"""Inputs that fuzzing found: each gave a traceback, or a message of many lines, before."""

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable

import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from fuzz.files import DESCRIPTION, TENSORS
from fuzz.messages import SENT, _update
from fuzz.outcome import outcome
from fuzz.parsers import PARSERS
from safetensors.torch import save

import bract
from bract.protocol.arrays import to_arrays

BY_NAME = {parser.name: parser for parser in PARSERS}
DEEP = "[" * 5000


def bundle(method: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr("pyproject.toml", b"[tool]\n" * 20)
    data = bytearray(stream.getvalue())
    data[60] ^= 0xFF
    return bytes(data)


def ciphertexts(**changes: object) -> RecordDict:
    """A ciphertext record whose header has other fields."""
    tensors = _update().to_tensors()
    header = json.loads(tensors["header"].numpy().tobytes())
    header["parameters"]["vector"].update(changes)
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return RecordDict({"ciphertexts": to_arrays(tensors | {"header": text})})


def reply(metrics: dict[str, int]) -> RecordDict:
    return RecordDict({"arrays": to_arrays(SENT), "metrics": MetricRecord(dict(metrics))})


def kept(header: str) -> bytes:
    return len(header).to_bytes(8, "big") + header.encode()


def tensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(24)


FOUND: dict[str, tuple[str, Callable[[], object]]] = {
    "a bundle of damaged LZMA": ("bundle", lambda: bundle(zipfile.ZIP_LZMA)),
    "a key id with a line break": ("ciphertexts", lambda: ciphertexts(key_id="a\nERROR b")),
    "a field with a line break": ("ciphertexts", lambda: ciphertexts(**{"\n": 1})),
    "randomness that is a list": ("ciphertexts", lambda: ciphertexts(randomness=[["djn"] * 99])),
    "a metric beyond floats": ("train reply", lambda: reply({"num-examples": 1, "x": 10**400})),
    "a score beyond floats": ("evaluate reply", lambda: reply({"accuracy": 10**400})),
    "fused models without a number": ("fused models", RecordDict),
    "fused models without end": (
        "fused models",
        lambda: RecordDict({"config": ConfigRecord({"models": 2**62})}),
    ),
    "a capture whose clip is beyond floats": (
        "observation.json",
        lambda: json.dumps(DESCRIPTION[0]).replace('"clip": 1.0', f'"clip": {10**400}').encode(),
    ),
    "a record with a long mechanism": (
        "record of answers",
        lambda: json.dumps({"mechanisms": {"9" * 5000: 1}}).encode(),
    ),
    "a record of endless rounds": (
        "record of answers",
        lambda: b'{"totals": {"train": ' + b"9" * 400 + b"}}",
    ),
    "a message without instructions": ("message at a client", RecordDict),
    "parameters of many names": (
        "message at a client",
        lambda: RecordDict(
            {
                "arrays": to_arrays({"x" * 500: torch.ones(1)}),
                "config": ConfigRecord({"server-round": 1, "bract-version": bract.__version__}),
            }
        ),
    ),
    "a policy that no run meets": (
        "site policy",
        lambda: b"batch_size: {minimum: 8, maximum: 4}",
    ),
    "a kept reply that is deep": ("kept reply", lambda: kept('{"label": ' + DEEP)),
    "a kept reply that is a list": ("kept reply", lambda: kept('["label"]')),
    "metrics that are no UTF-8": ("metrics.jsonl", lambda: b"\xff\n"),
    "a deep run.json": ("run.json", lambda: DEEP.encode()),
    "a deep audit result": ("audit result", lambda: b'{"schema": 4, "round": ' + DEEP.encode()),
    "a policy with an impossible date": ("site policy", lambda: b"require: 2020-13-45"),
    "a policy of a tag that does not fit": ("site policy", lambda: b"!!map 0"),
    "a defense that is no YAML": ("--defense", lambda: "noise:std={{{"),
    "aggregates that are a list": ("aggregates.json", lambda: b"[]"),
    "deep aggregates": ("aggregates.json", lambda: DEEP.encode()),
    "tensors whose offsets are text": (
        "capture tensors",
        lambda: tensors('{"fc.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}}'),
    ),
    "truth with one label for two images": (
        "truth",
        lambda: save({"images": torch.rand(2, 1, 8, 8), "labels": torch.tensor([1])}),
    ),
    "truth that is no images": (
        "truth",
        lambda: save({"images": TENSORS["fc.bias"], "labels": torch.tensor([1, 2])}),
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_is_refused_by_the_documented_error(found: str) -> None:
    name, make = FOUND[found]
    assert outcome(dataclasses.replace(BY_NAME[name]), make()) == "refused"
