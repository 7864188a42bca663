"""``left.jsonl``: what every reply of a client held, by name, kind and size, and what rules flag.

One line a reply, of whatever message type. It holds no value of a reply unless the operator of the
server asked for them (``capture.values``); a flag is the name of a rule and the rule's own fixed
words. Captures of earlier versions have no such file.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bract.schema.capture import MOST_ROUNDS, Bytes, Key
from bract.schema.declaration import Moment, Text
from bract.schema.record import Line, Number, Record, VersionedRecord

LEFT = "left.jsonl"
"""Next to the captures: one `LeftReply` a line."""

MOST_THINGS = 20_000
"""Things of one reply that are listed; the rest is counted."""

LEFT_BYTES = 1 << 26
"""Longest line that is read."""

Source = Literal["arrays", "metrics", "config", "error"]
"""The Flower record that held a thing; ``error``: the reason in place of a reply's content."""

Kind = Literal["array", "number", "numbers", "switch", "text", "texts", "bytes"]

Came = Literal["exact", "rounded", "withheld"]
"""How numbers came: ``rounded`` to few digits, ``withheld``: none of them is finite."""

Short = Annotated[str, Field(max_length=64)]
Shape = Annotated[tuple[Annotated[int, Field(ge=0, le=10**15)], ...], Field(max_length=64)]


class Flag(Record):
    """A rule's word on one thing.

    Attributes
    ----------
    rule
        Name of the rule in its registry.
    reason
        The rule's own words, the same whatever it flags, so that no value is in them.
    labels
        Whether what is flagged holds or counts labels.
    """

    rule: Short
    reason: Line
    labels: bool = False


class LeftThing(Record):
    """One thing of a reply.

    Attributes
    ----------
    source, record, name
        Kind of the Flower record, its key, and the key in it.
    kind
        What the value is.
    dtype, shape
        Of an array: its own. Else ``int``, ``float``, ``bool``, ``str`` or ``bytes``, and the
        number of entries of a list.
    size
        Bytes: of the numbers, of the text in UTF-8, or as they are.
    model
        Whether it is an array of a name and shape that the server had sent.
    came
        Of numbers; None where the rules saw none.
    claim
        The number, where the name says that it states a protection (``epsilon``, a noise
        multiplier, a clipping norm): no measurement of data.
    flags
        What rules said.
    value
        The value as JSON text, where the operator asked for values.
    """

    source: Source
    record: Key
    name: Key
    kind: Kind
    dtype: Short
    shape: Shape = ()
    size: Bytes = 0
    model: bool = False
    came: Came | None = None
    claim: Number = None
    flags: Annotated[tuple[Flag, ...], Field(max_length=64)] = ()
    value: Annotated[str, Field(max_length=4_000_000)] | None = None


class LeftReply(VersionedRecord):
    """All that one reply held.

    Attributes
    ----------
    run_id, node_id
        Flower's.
    client
        The client's name, as of its captures.
    message
        Type of the message that was answered, such as ``train`` or ``query``.
    round
        As the message names it; None where it names none.
    received
        Seconds since the epoch.
    things
        What it held, but for model arrays of a layout that is listed already.
    layouts
        By the key of a record of model arrays: the digest of its arrays' names, dtypes and shapes.
        The first reply of a layout lists its arrays.
    unlisted
        Things beyond `MOST_THINGS`.
    """

    kind: ClassVar[str] = "left"
    remedy: ClassVar[str] = "use the bract version that wrote it"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    run_id: Text | None = None
    node_id: Text
    client: Text
    message: Short
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] | None = None
    received: Moment | None = None
    things: Annotated[tuple[LeftThing, ...], Field(max_length=MOST_THINGS)] = ()
    layouts: Annotated[dict[Key, Short], Field(max_length=1000)] = {}
    unlisted: Annotated[int, Field(ge=0, le=10**9)] = 0
