"""The verdict: what was tried, by whom, with which budget, and what came back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bract.server.report.leak import LeakRule
from bract.server.report.schema import TIERS
from bract.server.report.summary import severity, strength

Facts = dict[str, Any]

TIER_MEANING = {
    "oblivious": "An attacker who takes every upload at face value and ignores any defense.",
    "adaptive": (
        "An attacker who knows the defense and its settings, but none of the client's secrets."
    ),
    "colluding": "An attacker who also holds one client's keys.",
}


def verdict(
    observations: Sequence[Facts],
    attacks: Sequence[Facts],
    *,
    captures: int,
    applies: Collection[str],
    rule: LeakRule,
) -> Facts:
    """Return the verdict over a run, and one for each tier.

    ``captures`` counts the uploads that the server holds; ``applies`` names the tiers that have
    something to know (`bract.server.report.threats.tiers_that_apply`); ``rule`` says when an image
    counts as leaked. Where several attackers were tried the strongest makes the headline; that
    choice takes the originals, and the sentence says so.

    ``level`` is ``leaked``, ``none-leaked``, ``unscored``, ``refused`` or ``not-attacked``. The
    sentences name tier, attack, budget and interval, and never call a run safe.
    """
    overall = [row for row in attacks if row["client"] is None]
    headline = max(overall, key=lambda row: (*strength(row), _match(row)), default=None)
    level, sentence = _overall(headline, attacks, observations, captures, rule)
    return {
        "level": level,
        "sentence": sentence,
        "limits": _limits(level),
        "rule": rule.text,
        "thresholds": {
            "ssim": rule.ssim,
            "psnr_margin_db": rule.psnr_margin,
            "level": rule.level,
        },
        "headline": headline,
        "tiers": [_tier(tier, overall, observations, applies) for tier in TIERS],
    }


def worst_observation(observations: Sequence[Facts], headline: Facts | None) -> int | None:
    """Return the position of the observation that leaked most, over all attacks.

    Where nothing was scored, it is the one of the headline attack whose gradient match, the
    attacker's own measure, is best. None without any reconstruction.
    """
    scored = [i for i, o in enumerate(observations) if o["scored"]]
    if scored:
        return max(scored, key=lambda i: (*severity(observations[i]), -i))
    mine = [
        i
        for i, o in enumerate(observations)
        if headline and _same(o, headline) and o["images"] and not o["refused"]
    ]
    return max(mine, key=lambda i: (_match(observations[i]), -i), default=None)


def _match(observation: Facts) -> float:
    cosine = observation["gradient_cosine"]
    return -2.0 if cosine is None else float(cosine)


def budget_text(row: Facts) -> str:
    """Say tier and budget in words: ``oblivious, 4,000 iterations, 2 restarts``."""
    parts = [str(row["tier"])]
    if row["iterations"]:
        parts.append(f"{row['iterations']:,} iterations")
    if row["budget_seconds"]:
        parts.append(f"{row['budget_seconds']:g} s an upload")
    if row["restarts"] and row["restarts"] > 1:
        parts.append(f"{row['restarts']} restarts")
    if row["repeats"] > 1:
        parts.append(f"{row['repeats']} seeds")
    if row["methods"]:
        names = sorted(row["methods"], key=lambda name: (-row["methods"][name], name))
        parts.append(f"settling blind on {' or '.join(names)}")
    return ", ".join(parts)


def spread_text(row: Facts) -> str:
    """Say mean SSIM and its interval: ``mean SSIM 0.52, 95 % interval 0.41 to 0.63``."""
    ssim = row["ssim"]
    if ssim["mean"] is None:
        return "no finite SSIM"
    text = f"mean SSIM {ssim['mean']:.2f}"
    if ssim["low"] is None:
        return f"{text}, no interval from {_count(row['uploads'], 'upload')}"
    return f"{text}, 95 % interval {ssim['low']:.2f} to {ssim['high']:.2f}"


def choice_text(rows: Sequence[Facts]) -> str:
    """Say that the strongest of these attack rows was chosen with the originals; or nothing."""
    scored = [row for row in rows if row["scored"]]
    if len(scored) < 2:
        return ""
    text = f"; the strongest of {len(scored)} attackers, chosen with the originals"
    if max(scored, key=strength)["ssim"]["low"] is not None:
        text += ", a choice that its interval does not cover"
    return text


def _overall(
    headline: Facts | None,
    attacks: Sequence[Facts],
    observations: Sequence[Facts],
    captures: int,
    rule: LeakRule,
) -> tuple[str, str]:
    if headline is None and observations:
        count = _count(len(observations), "upload")
        return "refused", f"No attack could run: {count} examined, all set aside for a reason."
    if headline is None:
        held = f"The server holds {_count(captures, 'captured upload')}" if captures else "No audit"
        return "not-attacked", (
            f"{held}, and nobody has tried to reconstruct images from them yet."
            if captures
            else f"{held} has run, and there is nothing captured to attack."
        )
    who = f"{headline['attack_name']} ({budget_text(headline)})"
    clients = [row for row in attacks if _same(row, headline) and row["client"] is not None]
    if not headline["scored"]:
        return "unscored", (
            f"{who} returned {_count(headline['images'], 'reconstruction')} from "
            f"{_count(len(clients), 'client')}; without the originals nobody has measured how "
            "close they are."
        )
    chosen = choice_text([row for row in attacks if row["client"] is None])
    if not headline["leaked"]:
        subject = "brought back none of the"
        if len([row for row in attacks if row["client"] is None]) > 1:
            who, subject = "None of the attacks tried", "brought back any of the"
            if len({(r["attack"], r["tier"]) for r in attacks}) == 2:
                who = "Neither attack tried"
        return "none-leaked", (
            f"{who} {subject} {_attempts(headline)} above the leak threshold; "
            f"{spread_text(headline)}{chosen}."
        )
    worst = max(clients, key=lambda row: (row["leaked"], *strength(row)))
    sentence = (
        f"{who} reconstructed {worst['leaked']} of {_attempts(worst)} of "
        f"{worst['client']}{_beside_guesses(worst, observations, rule)}"
    )
    if len(clients) > 1:
        sentence += (
            f"; over all {len(clients)} clients, {headline['leaked']} of {headline['scored']}"
        )
    return "leaked", f"{sentence}; {spread_text(headline)}{chosen}."


def _beside_guesses(row: Facts, observations: Sequence[Facts], rule: LeakRule) -> str:
    """Say what the leaked images of one client were held against, as the rule has it."""
    leaked = [
        (image, image["guess"]["ssim"], o["best_baseline"]["ssim"])
        for o in observations
        if _same(o, row) and o["client"] == row["client"] and not o["refused"]
        for image in o["images"]
        if image["leaked"]
    ]
    if any(own is None and upload is None for _, own, upload in leaked):
        return ", with no guess made without the gradient recorded to hold them against"
    if any(own is None for _, own, _ in leaked):
        return ", each above the guesses made without the gradient for its upload"
    text = ", each above the guesses made without the gradient for its image"
    if all(image["leaked_by"] == "ssim" for image, *_ in leaked):
        text += f" and {rule.level:.0%} of those for all attacked images"
    return text


def _attempts(row: Facts) -> str:
    """Count attacked images; with several seeds each image is attacked several times."""
    return _count(row["scored"], "attacked image" if row["repeats"] == 1 else "attempt")


def _limits(level: str) -> str:
    if level == "leaked":
        return (
            "These counts are a lower bound: a longer budget, more restarts or an attacker who "
            "knows more can only find more."
        )
    if level == "none-leaked":
        return (
            "This bounds the attacks listed here, at their budgets, and nothing else: it does not "
            "show that the uploads hide the images. What was not tried is listed below."
        )
    if level == "unscored":
        return (
            "Scores need the originals, which a client keeps only where its operator switched "
            "that on (truth: true). Judge the pictures by eye."
        )
    if level == "refused":
        return "An upload that could not be attacked here is not thereby hidden from everybody."
    return "Run the audit on this run directory to find out what the captures give away."


def _tier(
    tier: str, overall: Sequence[Facts], observations: Sequence[Facts], applies: Collection[str]
) -> Facts:
    rows = [row for row in overall if row["tier"] == tier]
    strongest = max(rows, key=strength, default=None)
    facts = {
        "tier": tier,
        "meaning": TIER_MEANING[tier],
        "tried": bool(rows),
        "needed": tier in applies,
        "attacks": [row["attack_name"] for row in rows],
        "strongest": strongest["attack_name"] if strongest else None,
        "scored": strongest["scored"] if strongest else 0,
        "leaked": strongest["leaked"] if strongest else 0,
    }
    if strongest and strongest["scored"]:
        facts["sentence"] = (
            f"{strongest['attack_name']}: {budget_text(strongest)}; {spread_text(strongest)}"
            f"{choice_text(rows)}"
        )
    elif strongest:
        facts["sentence"] = (
            f"{strongest['attack_name']}: {strongest['images']} reconstructions, not scored"
        )
    elif aside := sum(o["tier"] == tier and bool(o["refused"]) for o in observations):
        facts["sentence"] = f"{_count(aside, 'upload')} examined, all set aside for a reason."
    elif facts["needed"]:
        facts["sentence"] = "Not tried in this audit."
    elif tier == "adaptive":
        facts["sentence"] = "No defense was on, so there was none to know."
    else:
        facts["sentence"] = "No keys were in use."
    return facts


def _same(row: Facts, other: Facts) -> bool:
    return (row["attack"], row["tier"]) == (other["attack"], other["tier"])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
