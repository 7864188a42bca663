"""Strategies for inputs that nobody meant: random, damaged, and hostile in their structure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]


class Raw(str):
    """Text that goes into a JSON or YAML document as it stands."""

    __slots__ = ()


def deep(opening: str, closing: str, depth: int) -> Raw:
    return Raw(opening * depth + "0" + closing * depth)


HUGE = Raw("9" * 5000)
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, Raw("1e999"), Raw("-1e999"), Raw("1e400"), HUGE),
    *(Raw("-" + HUGE), Raw("9" * 4000), Raw("9" * 400), Raw("0." + "1" * 5000)),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("nan"), Raw("inf"), Raw("1_0"), Raw("+1")),
    *("", " ", "a", "\x00", "\n", "../../etc/passwd", "/etc/passwd", "..", ".", "~", "con", "-1"),
    *(
        "x" * 70,
        "x" * 300,
        "x" * 100_000,
        "é",
        "\u202e",
        "\ufeff",
        "\U0001f600",
        "1",
        "true",
        "nan",
    ),
    *("bract_fuzz_canary:run", "os:abort", "builtins:exec", "<script>alert(1)</script>", "{{7*7}}"),
    *("%s%n", "0x41", "node-7", "aggregate", "Aggregate", "djn", "standard", "none", "fedsgd"),
    *(Raw(r'"\ud800"'), Raw(r'"\udc00\ud800"'), Raw(r'"\u0000"'), Raw('"\\x"'), Raw("'"), Raw('"')),
    *([], {}, [[]], [{}], [None], [0] * 70, ["a"] * 600, {"": 0}, {"name": 0}, {"schema": 1}),
    *(Raw('{"a": 1, "a": 2}'), Raw("[,]"), Raw("{]"), Raw("")),
    *(deep("[", "]", n) for n in (40, 70, 320, 490, 900, 990, 1200, 5000, 60_000)),
    *(deep('{"a":', "}", n) for n in (40, 320, 900, 5000)),
    deep("[", "", 5000),
]
"""What a value of a document may become."""

BOMB = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else '1'}]\n" for n in range(12))
YAML: list[Any] = [
    *map(
        Raw,
        (
            "!!int abc",
            '!!int ""',
            "!!float x",
            '!!float ""',
            "!!bool x",
            "!!bool []",
            "!!null x",
            "!!timestamp x",
            "!!timestamp 2020-13-45",
            "!!binary x",
            "!!binary [1]",
            "!!set {a: 1}",
            "!!omap [1]",
            "!!pairs [a]",
            "!!str [a]",
            "!!map x",
            "!!seq x",
            "!!python/object/apply:os.system [touch bract_fuzz_canary]",
            "!!python/name:os.system ''",
            "!!python/module:bract_fuzz_canary ''",
            "!!python/tuple [1]",
            "!unknown x",
            "!<tag:yaml.org,2002:int> ''",
            "2020-13-45",
            "2020-02-30",
            "2020-01-01 00:00:00+99:99",
            "9999-12-31T23:59:59-23:59",
            "0001-01-01T00:00:00+23:59",
            "190:20:30",
            "1:99:99.5",
            "0b",
            "0b2",
            "0o7",
            "0x",
            "-",
            "? a",
            "&a [*a]",
            "&a {b: *a}",
            "*a",
            "*unknown",
            "&x [1, *x]",
            "{<<: 1}",
            "{<<: [1]}",
            "{<<: {a: 1}}",
            "{<<: &m {<<: *m}}",
            "{[1]: 2}",
            "{{a: b}: c}",
            "{? [a] : b}",
            "{1: 2}",
            "{null: 2}",
            "{2020-01-01: 2}",
            "{true: 1, 1: 2, 1.0: 3}",
            "|\n  text",
            ">-\n  text",
            "%YAML 9.9",
            "--- a",
            "...",
            "@a",
            "`a",
            "\t- a",
            '"\\u0000"',
            '"\\ud800"',
            "{{{",
            "[[[",
            ".inf",
            "-.inf",
            ".nan",
            "0o" + "7" * 6000,
            "0x" + "f" * 6000,
            "0b" + "1" * 40_000,
            "1:" * 2000 + "1",
        ),
    ),
    *HOSTILE,
]


def text_of(value: Any) -> str:
    """Write JSON in which `Raw` stands as it is, and a list of `Pair` is an object."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(k)}: {text_of(v)}" for k, v in value) + "}"
    if isinstance(value, dict):
        return text_of(Pairs(value.items()))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return json.dumps(value)


class Pairs(list[Any]):
    """An object whose keys may occur twice."""


def places(value: Any, here: Path = ()) -> list[Path]:
    """Return where the values of a document stand."""
    found = [here]
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list | tuple):
        items = enumerate(value[:8])
    for key, part in items:
        found += places(part, (*here, key))
    return found


def changed(value: Any, place: Path, change: Any) -> Any:
    """Return a copy of a document in which ``change`` was applied at one place."""
    if not place:
        return change(value)
    key, *rest = place
    if isinstance(value, dict):
        return {k: changed(v, tuple(rest), change) if k == key else v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [changed(v, tuple(rest), change) if k == key else v for k, v in enumerate(value)]
    return value


def _operations(values: list[Any]) -> dict[str, Any]:
    def remove(value: Any, other: Any) -> Any:
        if isinstance(value, dict) and value:
            return dict(list(value.items())[1:])
        return value[1:] if isinstance(value, list | tuple) and value else other

    def twice(value: Any, other: Any) -> Any:
        if isinstance(value, dict) and value:
            return Pairs([*value.items(), *((k, other) for k in list(value)[:1])])
        return [*value, *value] if isinstance(value, list | tuple) else [value, value]

    def add(value: Any, other: Any) -> Any:
        if isinstance(value, dict):
            name = other if isinstance(other, str) and not isinstance(other, Raw) else "unknown"
            return {**value, name: other}
        return [*value, other] if isinstance(value, list | tuple) else [value, other]

    def rename(value: Any, other: Any) -> Any:
        if isinstance(value, dict) and value:
            (_, first), *rest = value.items()
            return {"x" if not isinstance(other, str) else str(other): first, **dict(rest)}
        return other

    def other_type(value: Any, other: Any) -> Any:
        if isinstance(value, bool | None | int | float):
            return str(value)
        return [value] if isinstance(value, str | dict) else dict(enumerate(map(str, value)))

    return {
        "replace": lambda value, other: other,
        "remove": remove,
        "twice": twice,
        "add": add,
        "rename": rename,
        "type": other_type,
    }


@st.composite
def damaged(draw: Any, documents: list[Any], values: list[Any] = HOSTILE) -> Any:
    """Draw a valid document with up to three of its values changed."""
    value = draw(st.sampled_from(documents))
    operations = _operations(values)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2, 3]))):
        found = places(value)
        place = found[draw(st.integers(0, len(found) - 1))]
        operation = operations[draw(st.sampled_from(sorted(operations)))]
        other = draw(st.sampled_from(values))
        value = changed(value, place, lambda v, o=operation, w=other: o(v, w))
    return value


_BYTES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from([b"\x00", b"\xff" * 8, b"[" * 2000, b"\n", b"{", b"\xed\xa0\x80", b"9" * 5000]),
)


@st.composite
def mangled(draw: Any, wholes: list[bytes]) -> Any:
    """Draw valid bytes that were flipped, cut, repeated, extended or spliced."""
    data = draw(st.sampled_from(wholes))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(
            st.sampled_from(["flip", "cut", "repeat", "insert", "replace", "splice", "end"])
        )
        if kind == "flip":
            data = (
                data[:at]
                + bytes([(data[at] if data else 0) ^ draw(st.integers(1, 255))])
                + data[at + 1 :]
            )
        elif kind == "cut":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 64] * draw(st.integers(2, 40)) + data[at:]
        elif kind == "splice":
            other = draw(st.sampled_from(wholes))
            data = data[:at] + other[draw(st.integers(0, max(len(other) - 1, 0))) :]
        else:
            new = draw(_BYTES)
            end = {"insert": at, "replace": at + len(new), "end": len(data)}[kind]
            data = (data if kind == "end" else data[:at]) + new + data[end:]
    return data


def garbage() -> st.SearchStrategy[bytes]:
    """Draw random bytes."""
    return st.binary(max_size=200)


def documents(valid: list[Any], *, yaml: bool = False) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a JSON or YAML document: damaged in its structure, its bytes, or random."""
    values = YAML if yaml else HOSTILE
    wholes = [text_of(value).encode() for value in valid]
    structured = damaged(valid, values).map(lambda v: text_of(v).encode(errors="surrogatepass"))
    alone = st.sampled_from([v for v in values if isinstance(v, Raw)]).map(lambda v: v.encode())
    valid_ones = st.sampled_from(wholes)
    choices = [structured, structured, structured, mangled(wholes), garbage(), alone, valid_ones]
    if yaml:
        choices.append(
            st.sampled_from([BOMB, BOMB + "defenses: *x11", BOMB + "name: *x11"]).map(str.encode)
        )
    return st.one_of(choices)
