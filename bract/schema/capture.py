"""Define the records of a capture: its tensors, how it was read, where it came from.

Everything is typed and bounded, because a capture may come from a third party.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bract.schema.declaration import CaptureRecord, ClientDeclaration, Moment, Name, Reason, Text

OBSERVATION_SCHEMA: Literal[7] = 7
"""Version of ``observation.json``. Read as well: version 6, which did not hold how a reply was
read."""

READ_SCHEMAS = (6, 7)

MISSED = "missed.jsonl"
"""Next to the captures: one `MissedCapture` a line."""

REMOVED = "removed.jsonl"
"""Next to the captures: one `RemovedRound` a line."""

MOST_ROUNDS = 999_999


UpdateKind = Literal["weights", "delta", "gradient"]
"""What a reply of an app of its own holds: trained weights, trained minus received weights, or the
gradient."""

KindSource = Literal["declared", "inferred", "assumed"]
"""How something is known: by the operator's word, by the captured values, or not at all."""

Matched = Literal["name", "order"]

Key = Annotated[str, Field(max_length=200)]
Keys = Annotated[tuple[Key, ...], Field(max_length=1000)]


class LeftOut(CaptureRecord):
    """Something that came with a reply and is no part of its update.

    Attributes
    ----------
    kind
        The Flower record's kind.
    record, name
        The record's key, and the key in it; None for a whole record of arrays.
    values
        Numbers, characters or bytes that it holds.
    """

    kind: Literal["arrays", "metrics", "config"]
    record: Key
    name: Key | None = None
    values: Annotated[int, Field(ge=0, le=10**15)]


class UploadReading(CaptureRecord):
    """How the reply of an app of its own was read.

    Attributes
    ----------
    record
        Key of the record of arrays that was taken for the model.
    update, source
        What it holds, and how that is known.
    cosine
        Of the floating values returned with those that were sent: near 1 for weights.
    matched
        Whether its arrays were paired with those sent by name, or by order.
    absent
        Parameters and buffers that were sent and not returned; what was sent of them is among the
        capture's buffers.
    extra
        Arrays that were returned and not sent.
    unlike
        Matrices that came back with nothing of what was sent: the client's start of them was
        another one, perhaps its own last upload, or training diverged.
    previous
        Round of this client's capture before, which holds that upload; None where there is none.
    left_out
        Everything else in the reply.
    """

    record: Key
    update: UpdateKind = "weights"
    source: KindSource = "assumed"
    cosine: Annotated[float, Field(ge=-1.001, le=1.001, allow_inf_nan=False)] | None = None
    matched: Matched = "name"
    absent: Keys = ()
    extra: Keys = ()
    unlike: Keys = ()
    previous: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] | None = None
    left_out: Annotated[tuple[LeftOut, ...], Field(max_length=1000)] = ()


class Provenance(CaptureRecord):
    """Where an observation came from.

    Attributes
    ----------
    run_id, node_id
        Flower's.
    received
        Time of arrival in seconds since the epoch.
    metrics
        The reply's, by name; what JSON cannot express (NaN) is None.
    flags
        The client's claims that were not taken, and why.
    reading
        How the reply of an app of its own was read; None for bract's own clients.
    """

    run_id: Text | None = None
    node_id: Text | None = None
    received: Moment | None = None
    metrics: Annotated[dict[str, float | None], Field(max_length=512)] = {}
    flags: Annotated[tuple[Reason, ...], Field(max_length=64)] = ()
    reading: UploadReading | None = None

    @field_validator("metrics", mode="after")
    @classmethod
    def _finite(cls, metrics: dict[str, float | None]) -> dict[str, float | None]:
        return {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in metrics.items()
        }


Group = Literal["parameters", "buffers", "update", "returned_buffers", "ciphertexts"]
Names = Annotated[tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=100_000)]


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, le=10**18)]


class Rounding(CaptureRecord):
    """How an update was rounded before it was stored.

    Attributes
    ----------
    by
        ``store``: by the server, where an attacker need not round. ``client``: before it was sent
        (``training.update_dtype``), so that no one at the server has more digits.
    dtype
        In which float32 tensors were stored; they are read as float32 again.
    error
        ``|stored - came| / |came|`` of the whole update, in the Euclidean norm; None where the
        client rounded, since what it rounded did not come.
    saved
        Bytes by which the update is smaller than it came.
    kept
        Tensors that are stored as they came: not float32, or beyond what the type holds.
    """

    dtype: Literal["float16", "bfloat16"]
    error: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None
    saved: Bytes
    kept: Names = ()
    by: Literal["store", "client"] = "store"


class ObservationFile(BaseModel):
    """``observation.json``: an observation without its tensors, whose names it lists in order.

    ``sent`` holds the SHA-256 of the files with parameters and buffers, which the captures of a
    round share: ``.sent/<SHA-256>.safetensors`` next to the client's folder. ``packed`` is the size
    of ``update.safetensors`` where it is compressed to ``update.safetensors.zst``; ``uploaded``
    counts the bytes of all tensors that came, before they were rounded or compressed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    version: Literal[6, 7] = Field(default=OBSERVATION_SCHEMA, alias="schema")
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    client: Name
    declaration: ClientDeclaration
    provenance: Provenance = Provenance()
    tensors: dict[Group, Names] = {}
    sent: dict[Literal["parameters", "buffers"], Digest] = {}
    rounded: Rounding | None = None
    packed: Annotated[int, Field(ge=8, le=10**12)] | None = None
    uploaded: Bytes | None = None


class RemovedRound(CaptureRecord):
    """One line of ``removed.jsonl``: a captured round that gave way to later ones."""

    version: Literal[1] = Field(default=1, alias="schema")
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    captures: Annotated[int, Field(ge=0, le=10**9)]
    size: Bytes
    time: Moment

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class MissedCapture(CaptureRecord):
    """One line of ``missed.jsonl``: a reply that the server held and did not write down."""

    version: Literal[1] = Field(default=1, alias="schema")
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    node_id: Text
    reason: Reason

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
