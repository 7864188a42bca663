"""Facts about the captures themselves: what clients contradicted, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bract.errors import one_line, shown
from bract.registry import unknown
from bract.report.read import RunFiles
from bract.schema.inputs import INPUT_OUTLINES
from bract.schema.report import RefusedFacts

_SHOWN = 3


def contradictions(files: RunFiles) -> list[str]:
    """Note where a client's claims contradict what the server declares."""
    found = Counter((c.client, flag) for c in files.captures for flag in c.provenance.flags)
    if not found:
        return []
    shown = "; ".join(f"{client} {flag}" for (client, flag), _ in found.most_common(_SHOWN))
    more = f"; and {len(found) - _SHOWN} others" if len(found) > _SHOWN else ""
    return [
        "Claims of clients that contradict the server's declaration and were not used: "
        f"{shown}{more}."
    ]


def guesses(files: RunFiles) -> list[str]:
    """Return notes on undeclared parts of the attacker's context, and their sources."""
    if files.description is None or not files.description.guessed:
        return []
    given = files.description.given()
    shown = "; ".join(
        f"{key} {_text(given[key])} ({reason})" for key, reason in files.description.guessed.items()
    )
    return [
        f"Guessed from the captures, and not declared: {shown}. Where a guess is wrong, an "
        "attacker who knows better gets more than is shown here: correct it in bract.yaml, and "
        "audit again."
    ]


def _text(value: object) -> str:
    return "×".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def unhandled_inputs(files: RunFiles) -> list[str]:
    """Name the inputs of captures that are not installed, or that the audit had no attack for."""
    notes = []
    for kind in sorted({c.declaration.input for c in files.captures}):
        asked = [audit for _, audit in files.audits if audit.input == kind]
        if kind not in INPUT_OUTLINES:
            notes.append(f"{unknown('input', kind, INPUT_OUTLINES)}.")
        elif asked and not any(audit.titles for audit in asked):
            notes.append(f"no attack handles the input {shown(kind)}.")
    return notes


def missing_captures(files: RunFiles) -> list[str]:
    """Note which replies the server held and did not store."""
    if not files.missed:
        return []
    reason = files.missed[-1].reason
    return [
        f"{len(files.missed)} replies of round {ranges(m.round for m in files.missed)} were not "
        f"captured, so this page does not cover them; the last because: {reason}."
    ]


def left_out(files: RunFiles) -> list[str]:
    """Note what the operator chose not to capture, not to keep, or to keep elsewhere."""
    notes = []
    capture = None if files.config is None else files.config.capture
    if capture is not None and capture.enabled:
        chosen = []
        if capture.rounds is not None:
            chosen.append(f"round {ranges(capture.rounds)}")
        if capture.every > 1:
            chosen.append(f"one round in {capture.every} from the first")
        if capture.clients is not None:
            chosen.append(f"the clients {one_line(', '.join(capture.clients), 200)}")
        if capture.fraction < 1.0:
            chosen.append(f"{100 * capture.fraction:g} % of the replies, drawn by the seed")
        if chosen:
            notes.append(
                f"The configuration captures {', '.join(chosen)} alone: this page "
                "does not cover the other replies."
            )
    there = {c.round for c in files.captures}
    gone = [removed for removed in files.removed if removed.round not in there]
    if gone:
        notes.append(
            f"The captures of round {ranges(g.round for g in gone)} were removed for later ones "
            "(capture.keep_rounds); what is shown here of them was attacked before."
        )
    if not files.captures and files.config is not None:
        place = files.config.capture.place(files.config.name)
        if place is not None:
            notes.append(f"The captures are at {one_line(place, 300)}; `bract fetch` copies them.")
    return notes


def ranges(numbers: Iterable[int]) -> str:
    """Write rounds as ``1-3, 7``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = (f"{a}-{b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in found)
    return ", ".join(words)


@dataclass(frozen=True)
class SetAside:
    """Uploads that one attack of one tier set aside for one reason."""

    rounds: str
    clients: str
    attack: str
    reason: str


def set_aside(refused: Iterable[RefusedFacts]) -> list[SetAside]:
    """Return one row for each attack, tier and reason, in the order in which they first occur."""
    alike: dict[tuple[str, str, str], list[RefusedFacts]] = {}
    for one in refused:
        alike.setdefault((one.attack_name, one.tier, one.refused), []).append(one)
    return [
        SetAside(
            rounds=ranges(one.round for one in found),
            clients=_named([one.client for one in found]),
            attack=f"{attack}, {tier}",
            reason=reason,
        )
        for (attack, tier, reason), found in alike.items()
    ]


def _named(clients: Sequence[str]) -> str:
    names = list(dict.fromkeys(clients))
    more = len(names) - _SHOWN
    if more <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {more} more, {len(clients)} uploads"
