"""Parts of a text of JSON, or of bytes of numpy, as rules look at them."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bract.server.things import MOST_TEXT, Thing, decoded, single

MOST_PARTS = 10_000
"""Parts of one text of JSON that rules are shown; a text of more is looked at as a text, too."""

MOST_NODES = 100_000
"""Values of JSON, and objects and lists of them, that are walked in one reply."""

_LONG_KEY = 64

_MOST_KEYS = 10_000
"""Characters of different keys of one text of JSON up to which they are names of fields."""

NUMPY = b"\x93NUMPY"
"""How bytes begin that numpy wrote."""

_MOST_NAME = 1000

_DIGITS = re.compile(r"\d+")

_APART = re.compile(r"[\s_-]")
"""Between words of a path; another there keeps a list of all rows out of the group of the rows."""


@dataclass
class Walk:
    """Allowance of what is walked of one reply's JSON.

    Attributes
    ----------
    left
        Values, objects and lists.
    cut
        Whether something was left out.
    """

    left: int = field(default_factory=lambda: MOST_NODES)
    cut: bool = False


def parts_of(thing: Thing, walk: Walk) -> Iterator[Thing]:
    """Yield a thing as rules see it: itself, and what a text of JSON or bytes of numpy hold.

    At most `MOST_PARTS` and one more are yielded, and no more is walked than is left.
    """
    return islice(_parts_of(thing, walk), MOST_PARTS + 1)


def _parts_of(thing: Thing, walk: Walk) -> Iterator[Thing]:
    yield thing
    held = [thing.value] if isinstance(thing.value, str | bytes) else []
    for value in held:
        if isinstance(value, bytes):
            yield from _of_numpy(thing, value)
        text = value if isinstance(value, str) else decoded(value)
        if text and text.lstrip()[:1] in ("{", "[") and len(text) <= MOST_TEXT:
            if walk.left <= 0:
                walk.cut = True
                continue
            try:
                yield from _of_json(thing, _read(text), walk)
            except (ValueError, RecursionError):
                continue


class _Pairs(tuple[tuple[str, Any], ...]):
    """Keys and values of an object of JSON, of which a key may stand twice."""

    __slots__ = ()


def _read(text: str) -> Any:
    """Read JSON, and all that another reader may take from it: nothing is left out or refused."""
    return json.loads(text, object_pairs_hook=_Pairs, parse_int=_number)


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= 20 else float(digits[:400])


def numpy_array(value: bytes) -> NDArray[Any] | None:
    """Return the numbers or texts that bytes of numpy hold; None of other bytes and objects."""
    if not value.startswith(NUMPY):
        return None
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(value), allow_pickle=False)
    except Exception:  # noqa: BLE001 - another party's bytes; what is no array is no part
        return None
    # Texts of no width are as many as a header says, without a byte of their own.
    return array if array.dtype.kind in "biufU" and array.size <= len(value) else None


def _of_numpy(thing: Thing, value: bytes) -> Iterator[Thing]:
    array = numpy_array(value)
    if array is None:
        return
    if array.dtype.kind == "U":
        texts = array.reshape(-1).tolist()
        yield replace(thing, value=texts, dtype="str", shape=(len(texts),))
    else:
        dtype = "int" if array.dtype.kind in "iu" else "float"
        yield replace(thing, value=array, dtype=dtype, shape=array.shape)


def _of_json(thing: Thing, whole: Any, walk: Walk) -> Iterator[Thing]:
    """Yield what is in JSON, in its order, however deep it is nested.

    A list that holds more than numbers is yielded with the number of its entries, and so is an
    object whose keys differ in numbers alone; all numbers under one path in such a list are yielded
    once more, in one list; then keys, where they are long or many.
    """
    keys: set[str] = set()
    numbers: dict[str, list[list[int | float]]] = defaultdict(list)
    left = [_Level(iter([(thing.name, whole)]), listed=False)]
    while left:
        found = next(left[-1].held, None)
        if found is None:
            left.pop()
            if numbers and not left[-1].listed:
                for name, rows in numbers.items():
                    if len(rows) > 1:
                        yield _row(thing, _APART.sub(".", name), list(chain(*rows)))
                numbers.clear()
            continue
        if walk.left <= 0:
            walk.cut = True
            return
        walk.left -= 1
        name, value = found
        listed = left[-1].listed
        if isinstance(value, _Pairs):
            keys.update(key for key, _ in value)
            if len(value) > 1 and len({_DIGITS.sub("#", key) for key, _ in value}) == 1:
                yield _whole(thing, name, [held for _, held in value])
            left.append(_Level(_named(name, value), listed))
        elif isinstance(value, list) and not _are_numbers(value):
            if len(value) > 1:
                yield _whole(thing, name, value)
            left.append(_Level(zip(repeat(name), value, strict=False), listed=True))
        elif isinstance(value, list):
            if listed:
                numbers[name].append(value)
            yield _row(thing, name, value)
        elif isinstance(value, bool | int | float | str):
            if listed and not isinstance(value, bool | str):
                numbers[name].append([value])
            yield single(thing.source, thing.record, name, value)
    if sum(map(len, keys)) > _MOST_KEYS:
        yield single(thing.source, thing.record, "keys", sorted(keys))
    elif long := sorted(key for key in keys if len(key) > _LONG_KEY):
        yield single(thing.source, thing.record, "keys", long)


class _Level(NamedTuple):
    """Rest of an object or a list, and whether it is in a list."""

    held: Iterator[tuple[str, Any]]
    listed: bool


def _row(thing: Thing, name: str, values: list[int | float]) -> Thing:
    """Return a list of numbers, floats where one of them is."""
    entries = [float(value) for value in values] if float in map(type, values) else values
    return single(thing.source, thing.record, name, entries)


def _whole(thing: Thing, name: str, values: list[Any]) -> Thing:
    """Return a list by its length: of switches with its entries, which a rule may look at."""
    if all(isinstance(value, bool) for value in values):
        return single(thing.source, thing.record, name, values)
    return Thing(thing.source, thing.record, name, None, "list", (len(values),))


def _named(name: str, pairs: _Pairs) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each under the object's name and its own key."""
    for key, value in pairs:
        yield f"{name} {key}"[-_MOST_NAME:], value


def _are_numbers(values: list[Any]) -> bool:
    return bool(values) and {type(value) for value in values} <= {int, float}
