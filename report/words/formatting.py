"""Numbers, times and counts in words, for the page."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache

from bract.disk.files import readable_size
from bract.schema.inputs import outline_of
from bract.schema.reach import LeakCounts
from bract.schema.report_rows import Spread

NOTHING = "–"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with fixed digits; a dash for None."""
    if value is None:
        return NOTHING
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def value(found: str | float | int | bool | None) -> str:
    """Return a table's value: numbers with four significant digits, a dash for None."""
    if found is None:
        return NOTHING
    return f"{found:.4g}" if isinstance(found, float) else str(found)


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share in [0, 1] as per cent; a dash for None."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Return seconds as the two largest units that matter: ``0.8 s``, ``12 s``, ``3 min 20 s``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def step_time(seconds: float | None) -> str:
    """Return a short time: ``0.42 ms``, ``12.3 ms``, and from one second on as `duration` does."""
    if seconds is None or seconds >= 1:
        return duration(seconds)
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1}f} ms"


def size(count: float | None) -> str:
    """Return a number of bytes: ``812 B``, ``61.2 kB``, ``4.6 MB``; a dash for None."""
    return NOTHING if count is None else readable_size(count)


def signed(value: float | None, digits: int = 1) -> str:
    """Return a difference with its sign, minus as U+2212; a dash for None."""
    if value is None:
        return NOTHING
    rounded = round(value, digits) + 0.0
    sign = "\u2212" if rounded < 0 else "+" if rounded > 0 else "±"
    return f"{sign}{abs(rounded):.{digits}f}"


def moment(text: str | None) -> str:
    """Return ISO 8601 text as ``2026-03-01 12:30:05 UTC``; other text as it is."""
    if not text:
        return NOTHING
    return text.replace("T", " ").replace("+00:00", " UTC")


def span(score: Spread, digits: int = 2) -> str:
    """Return a score's interval as ``0.41 to 0.62``; empty where there is none."""
    if score.low is None or score.high is None:
        return ""
    return f"{score.low:.{digits}f} to {score.high:.{digits}f}"


def noun_of(inputs: Iterable[str]) -> str:
    """Return what one example of these inputs is called; ``example`` for several or unknown."""
    known = {outline_of(kind).noun for kind in inputs}
    return known.pop() if len(known) == 1 else "example"


def plural(count: int, noun: str) -> str:
    """Return ``1 image``, ``2 images``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counted(row: LeakCounts, noun: str) -> str:
    """Return ``2 of 3 images leaked, 1 undecided``, ``3 not judged``; empty without any score.

    The second number is of those that were judged: what is undecided never counts as not leaked.
    """
    parts = [f"{row.leaked} of {plural(row.judged, noun)} leaked"] if row.judged else []
    return ", ".join([*parts, *left_open(row)])


def left_open(row: LeakCounts) -> list[str]:
    """Return how many examples are undecided, and not judged."""
    counts = ((row.undecided, "undecided"), (row.unjudged, "not judged"))
    return [f"{count} {word}" for count, word in counts if count]


def pieces(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return what stands before each token of a text, a space or nothing, and its characters.

    Marks of word pieces are taken off: ``##ing`` goes on a word, ``▁word`` and ``Ġword`` begin one,
    and the letters that byte-level tokenizers (GPT-2's) write for bytes become characters again.
    Where a vocabulary does not mark spaces, punctuation is set as people write it: ``Dr. Lee's``,
    ``(3.5)``, ``follow-up``. Characters that control a terminal or the
    direction of text are marked.
    """
    return [(space, _harmless(text)) for space, text in _split(values)]


def _harmless(text: str) -> str:
    """Replace control characters, and those that reorder the text behind them."""
    return "".join(
        "\ufffd"
        if (unicodedata.category(c) == "Cc" and c not in "\n\t")
        or unicodedata.bidirectional(c) in _REORDERING
        else c
        for c in text
    )


_REORDERING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def _split(values: Sequence[str]) -> list[tuple[str, str]]:
    if any(value.startswith("Ġ") for value in values):
        return [(" " if value.startswith("Ġ") else "", _of_bytes(value)) for value in values]
    if any(value.startswith("▁") for value in values):
        return [(" " if v.startswith("▁") else "", v.lstrip("▁")) for v in values]
    texts = [value.removeprefix("##") for value in values]
    goes_on = [value.startswith("##") for value in values]
    spaces = [
        "" if goes_on[place] or _is_tight(texts, place) else " " for place in range(len(texts))
    ]
    return list(zip(spaces, texts, strict=True))


_CLOSING = frozenset(".,;:!?%)]}'’")
_OPENING = frozenset("([{")
_JOINING = frozenset("-/'’@_")
"""Joins words or numbers, where one stands on each side."""

_IN_NUMBERS = frozenset(".,:")


def _is_tight(texts: Sequence[str], place: int) -> bool:
    """Return whether no space stands before a token, by its neighbours."""
    before = texts[place - 1] if place else ""
    before_that = texts[place - 2] if place > 1 else ""
    token = texts[place]
    after = texts[place + 1] if place + 1 < len(texts) else ""
    if token in _CLOSING or before in _OPENING:
        return True
    if token in _JOINING:
        return before[-1:].isalnum() and after[:1].isalnum()
    if before in _JOINING:
        return before_that[-1:].isalnum() and token[:1].isalnum()
    return before in _IN_NUMBERS and before_that[-1:].isdigit() and token[:1].isdigit()


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for (GPT-2's table)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def _of_bytes(token: str) -> str:
    """Return a byte-level token as text; the part of a character that it may hold is marked."""
    letters = _bytes_of_letters()
    if any(letter not in letters for letter in token):
        return token
    text = bytes(letters[letter] for letter in token).decode("utf-8", errors="replace")
    return text.removeprefix(" ")


def tight(text: str) -> str:
    """Keep counts such as ``3 of 9`` on one line, by spaces that do not break."""
    return re.sub(r"(\d) of (\d)", "\\1\u00a0of\u00a0\\2", text)
