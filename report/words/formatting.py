"""Numbers, times and counts in words, for the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bract.disk.files import readable_size
from bract.schema.inputs import outline_of
from bract.schema.report import LeakCounts, Spread

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

    Marks of word pieces are taken off: ``##ing`` goes on a word, ``▁word`` and ``Ġword`` begin one.
    """
    starts = ("▁", "Ġ")
    marked = any(value.startswith(starts) for value in values)
    found = []
    for value in values:
        begins = value.startswith(starts) if marked else not value.startswith("##")
        text = value.lstrip("▁Ġ") if marked else value.removeprefix("##")
        found.append((" " if begins else "", text))
    return found


def tight(text: str) -> str:
    """Keep counts such as ``3 of 9`` on one line, by spaces that do not break."""
    return re.sub(r"(\d) of (\d)", "\\1\u00a0of\u00a0\\2", text)
