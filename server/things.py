"""Everything that a reply holds, thing by thing, as rules look at it before it is forgotten."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from numpy.typing import NDArray

from bract.errors import BractError
from bract.protocol.arrays import PACKED, view_arrays
from bract.protocol.records import ARRAYS, BUFFER_ENDINGS
from bract.schema.left import Kind, Source

MOST_NUMBERS = 4_000_000
"""Numbers of one thing that rules are shown; of a longer one they see name and size."""

MOST_TEXT = 4_000_000
"""Characters or bytes of a text that is read as JSON, or as text at all."""

_OWN_CLASSES = 20
"""Rows up to which a layer on the examples themselves may be a client's own head."""

_OF_LAYERS = ("weight", "bias", *BUFFER_ENDINGS)

_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Za-z])(?=[0-9])")

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the arrays of one record, by name."""


MOST_LETTERS = 100_000
"""Characters of one thing's texts that rules are shown."""


@dataclass(frozen=True)
class Thing:
    """One entry of a reply's records, or a part of a text that is JSON.

    Attributes
    ----------
    source, record, name
        Kind of the record that holds it, the record's key, and its key there.
    value
        An array, a number, a text, bytes, or a list of one of the latter; None of an array that
        cannot be read.
    dtype, shape
        Of an array; ``()`` of a single value, and ``(entries,)`` of a list.
    size
        Bytes.
    model
        Whether it is an array of the model that the server had sent.
    state
        Whether it has the name and shape of one in another record, as moments of an optimizer do.
    layer
        Whether it is a layer in the model's record that was not sent, as a head of the client's own
        is.
    structure
        Whether it is a text of JSON, whose parts are all looked at in its place.
    """

    source: Source
    record: str
    name: str
    value: Any
    dtype: str
    shape: tuple[int, ...] = ()
    size: int = 0
    model: bool = False
    state: bool = False
    layer: bool = False
    structure: bool = False

    @property
    def kind(self) -> Kind:
        """Return how the value is listed."""
        if self.source == "arrays":
            return "array"
        if isinstance(self.value, list):
            return "texts" if self.dtype in ("str", "bytes") else "numbers"
        kinds: dict[str, Kind] = {"str": "text", "bytes": "bytes", "bool": "switch"}
        return kinds.get(self.dtype, "number")

    @cached_property
    def words(self) -> frozenset[str]:
        """The lower-case words of the record's key and its own."""
        parts = _SPLIT.split(f"{self.record} {self.name}")
        return frozenset(part.lower() for part in parts if part)

    @cached_property
    def own_words(self) -> frozenset[str]:
        """The lower-case words of its own key."""
        return frozenset(part.lower() for part in _SPLIT.split(self.name) if part)

    @cached_property
    def record_words(self) -> frozenset[str]:
        """The lower-case words of the record's key."""
        return frozenset(part.lower() for part in _SPLIT.split(self.record) if part)

    @property
    def count(self) -> int:
        """Number of its numbers, also where they are too many for `numbers`."""
        if self.value is None or self.dtype in ("str", "bytes") or self.model:
            return 0
        return math.prod(self.shape)

    @property
    def entries(self) -> frozenset[int]:
        """Numbers of entries that it has as a list of whatever type: of all, and of rows."""
        if self.model or not self.shape:
            return frozenset()
        return frozenset({math.prod(self.shape), self.shape[0]}) - {0, 1}

    @cached_property
    def numbers(self) -> NDArray[np.float64] | None:
        """Its finite or infinite numbers in a row; None where it holds none, or too many."""
        if self.value is None or self.dtype in ("str", "bytes") or self.model:
            return None
        if math.prod(self.shape) > MOST_NUMBERS:
            return None
        # numpy has no name for bfloat16.
        value = self.value.float() if self.dtype == "bfloat16" else self.value
        return np.asarray(value, dtype=np.float64).reshape(-1)

    @cached_property
    def texts(self) -> list[str]:
        """Its texts up to `MOST_LETTERS` in all; bytes that are printable UTF-8 are one."""
        values = self.value if isinstance(self.value, list) else [self.value]
        found, left = [], MOST_LETTERS
        for value in values:
            if isinstance(value, bytes):
                value = decoded(value)
            if isinstance(value, str) and value.strip() and left > 0:
                found.append(value[:left])
                left -= len(value)
        return found


def decoded(value: bytes) -> str | None:
    """Return bytes of printable UTF-8 as a text; None of others, and of too many."""
    if len(value) > MOST_TEXT:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c.isspace() for c in text) else None


@dataclass(frozen=True)
class About:
    """What rules know of a reply beside its things.

    Attributes
    ----------
    message
        Type of the message that was answered.
    classes
        Numbers of classes that the model may have: outputs of its last layer.
    widths
        Sizes of the model's layers and of what enters them.
    examples
        Numbers of examples that the reply declares.
    shapes
        Shapes of the arrays that the server sent.
    update
        Key of the record of arrays that is the update in a form of its own: the largest, where a
        reply to training holds none of the model's arrays; else None.
    """

    message: str
    classes: frozenset[int] = frozenset()
    widths: frozenset[int] = frozenset()
    examples: frozenset[int] = frozenset()
    shapes: frozenset[tuple[int, ...]] = frozenset()
    update: str | None = None


@dataclass(frozen=True)
class Sent:
    """Shapes of the arrays that the server sent, by the key of their record."""

    records: Mapping[str, Shapes] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Message) -> Sent:
        """Read a request."""
        found = {key: _shapes(record) for key, record in message.content.array_records.items()}
        return cls({key: shapes for key, shapes in found.items() if shapes})

    @property
    def classes(self) -> frozenset[int]:
        """Outputs of the last layer, where that is linear."""
        found = set()
        for shapes in self.records.values():
            last = [shape for shape in shapes.values() if len(shape) in (1, 2)][-2:]
            found |= {shape[0] for shape in last[-1:] if 2 <= shape[0] <= 100_000}
        return frozenset(found)

    @property
    def widths(self) -> frozenset[int]:
        """Sides of all arrays, and what enters a matrix."""
        shapes = [shape for held in self.records.values() for shape in held.values()]
        return frozenset(side for s in shapes for side in (*s, math.prod(s[1:])) if side > 1)

    @property
    def shapes(self) -> frozenset[tuple[int, ...]]:
        """Return the shapes of all arrays, and of all of a record's in one row."""
        rows = {(sum(map(math.prod, held.values())),) for held in self.records.values()}
        return frozenset(rows.union(*(held.values() for held in self.records.values())))

    def model_records(self, content: Any) -> set[str]:
        """Return keys of a reply's records of arrays that hold what was sent, moved by training.

        By names and shapes, each array once: of records with the same names the one that answers a
        sent record, as `bract.protocol.reading` reads replies. Where no record has those names, the
        largest whose shapes were sent.
        """
        known = list(self.records.values())
        held = {key: _shapes(record) for key, record in content.array_records.items()}
        named = {}
        for key, shapes in held.items():
            most = max((shapes.items() & sent.items() for sent in known), key=len, default=set())
            if most and len(most) * 2 >= len(shapes):
                named[key] = most

        def rank(key: str) -> tuple[bool, bool, int]:
            return key in self.records, key == ARRAYS, len(named[key])

        taken: set[tuple[str, tuple[int, ...]]] = set()
        models = set()
        for key in sorted(named, key=rank, reverse=True):
            if len(named[key] & taken) * 2 < len(named[key]):
                models.add(key)
                taken |= named[key]
        if models:
            return models
        alike = [
            (sum(map(math.prod, shapes.values())), key)
            for key, shapes in held.items()
            if shapes and any(_within(shapes, sent) for sent in known)
        ]
        return {max(alike)[1]} if alike else set()

    def model_names(self, shapes: Shapes, *, ordered: bool = True) -> set[str]:
        """Return the arrays of a record that are the model's: by name, or all by their order.

        A shape alone shows nothing: means by class have that of the last layer.

        Parameters
        ----------
        ordered
            Whether their order may show it.
        """
        named = {
            name
            for sent in self.records.values()
            for name, shape in shapes.items()
            if sent.get(name) == shape
        }
        in_order = [list(shapes.values()) == list(sent.values()) for sent in self.records.values()]
        return set(shapes) if ordered and not named and any(in_order) else named

    def is_layer(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an array is named as a layer's and fits between layers of the model.

        Values enter it as they leave or enter a later layer, and it has no more rows than that.
        What enters the first layer are the examples themselves, and rows as wide may be examples:
        they are a layer only of a model that is one, and few.
        """
        if name.rpartition(".")[2] not in _OF_LAYERS:
            return False
        rows = shape[0] if shape else 0
        inner = math.prod(shape[1:])
        for first, *later in self._matrices:
            within = {first[0]}.union(*((s[0], math.prod(s[1:])) for s in later))
            fits = len(shape) < 2 or inner in within
            if fits and rows <= max(within):
                return True
            alone = not later and inner == math.prod(first[1:])
            if (len(shape) < 2 or alone) and rows <= _OWN_CLASSES:
                return True
        return False

    @property
    def _matrices(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of each record's arrays of two dimensions or more, in their order."""
        held = [[s for s in held.values() if len(s) > 1] for held in self.records.values()]
        return [shapes for shapes in held if shapes]


def _within(shapes: Shapes, sent: Shapes) -> bool:
    left = list(sent.values())
    for shape in shapes.values():
        if shape not in left:
            return False
        left.remove(shape)
    return True


def _shapes(record: ArrayRecord) -> Shapes:
    """Return the shapes of a record's arrays; packed ones, and those of the older API, are read."""
    if PACKED not in record and all(array.dtype for array in record.values()):
        return {name: tuple(map(int, array.shape)) for name, array in record.items()}
    try:
        return {name: tuple(value.shape) for name, value in view_arrays(record).items()}
    except BractError:
        return {}


def things_of(reply: Message, sent: Sent) -> list[Thing]:
    """Return all that a reply holds, in its order; the reason of an error is a text."""
    if not reply.has_content():
        reason = str(reply.error.reason)
        return [single("error", "error", "reason", reason)]
    content = reply.content
    models = sent.model_records(content)
    found: list[Thing] = []
    for key, record in content.array_records.items():
        found += _arrays(key, record, sent, model=key in models)
    for key, measured in content.metric_records.items():
        found += [single("metrics", key, name, value) for name, value in measured.items()]
    for key, said in content.config_records.items():
        found += [single("config", key, name, value) for name, value in said.items()]
    return found


def _arrays(key: str, record: ArrayRecord, sent: Sent, *, model: bool) -> list[Thing]:
    try:
        values = view_arrays(record)
    except BractError:
        return [
            Thing("arrays", key, name, None, str(a.dtype), tuple(a.shape), len(a.data))
            for name, a in record.items()
        ]
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    named = sent.model_names(shapes, ordered=model)
    layers = {n for n, shape in shapes.items() if model and sent.is_layer(n, shape)}
    return [
        Thing(
            source="arrays",
            record=key,
            name=name,
            value=value,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            size=value.numel() * value.element_size(),
            model=model and name in named,
            state=not model and name in named,
            layer=name in layers - named,
        )
        for name, value in values.items()
    ]


def single(source: Source, record: str, name: str, value: Any) -> Thing:
    """Return an entry of a record of metrics or config."""
    listed = isinstance(value, list)
    first = value[0] if listed and value else value
    dtype = "float" if listed and not value else type(first).__name__
    values = value if listed else [value]
    if isinstance(first, str):
        size = sum(len(text.encode(errors="replace")) for text in values)
    elif isinstance(first, bytes):
        size = sum(map(len, values))
    else:
        size = (1 if isinstance(first, bool) else 8) * len(values)
    shape = (len(value),) if listed else ()
    return Thing(source, record, name, value, dtype, shape, size)
