"""Facts about the captures themselves: what clients contradicted, and what is missing."""

from __future__ import annotations

from collections import Counter

from bract.report.facts.reading import RunFiles

_SHOWN = 3


def contradictions(files: RunFiles) -> list[str]:
    """Say where a client's word about its computation was not what the server declares."""
    found = Counter((c.client, flag) for c in files.captures for flag in c.provenance.flags)
    if not found:
        return []
    shown = "; ".join(f"{client} {flag}" for (client, flag), _ in found.most_common(_SHOWN))
    more = f"; and {len(found) - _SHOWN} others" if len(found) > _SHOWN else ""
    return [f"What clients said and the server did not take at its word: {shown}{more}."]


def guesses(files: RunFiles) -> list[str]:
    """Say which parts of the attacker's context nobody declared, and where they are from."""
    if files.description is None or not files.description.guessed:
        return []
    given = files.description.given()
    shown = "; ".join(
        f"{key} {_text(given[key])} ({reason})" for key, reason in files.description.guessed.items()
    )
    return [
        f"Guessed from the captures, and declared by nobody: {shown}. Where a guess is wrong, an "
        "attacker who knows better gets more than stands here: correct it in bract.yaml, and audit "
        "again."
    ]


def _text(value: object) -> str:
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def missing_captures(files: RunFiles) -> list[str]:
    """Say which replies the server held and could not write down."""
    if not files.missed:
        return []
    rounds = sorted({missed.round for missed in files.missed})
    reason = files.missed[-1].reason
    return [
        f"{len(files.missed)} replies of round {', '.join(map(str, rounds))} were not captured, so "
        f"nothing here speaks of them; the last because: {reason}."
    ]
