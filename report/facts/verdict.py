"""The verdict: what was tried, by whom, with which budget, and what came back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bract.audit.scoring.leak import LeakRule
from bract.report.facts.attack_text import budget_text, choice_text, spread_text
from bract.report.facts.formatting import plural
from bract.report.facts.headline import headline, same_attack
from bract.report.facts.next_steps import next_steps
from bract.report.facts.summary import severity, strength
from bract.schema import TIERS

Facts = dict[str, Any]

TIER_MEANING = {
    "oblivious": "An attacker who takes every upload at face value and ignores any defense.",
    "adaptive": (
        "An attacker who knows the defense and its settings, but none of the client's secrets."
    ),
    "surrogate": (
        "An attacker who knows the defense too, and holds public images like the clients', of "
        "which a generator was made."
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
    configured: bool = True,
) -> Facts:
    """Return the verdict over a run, one for each tier, and what to do next.

    ``captures`` counts the uploads that the server holds; ``applies`` names the tiers that have
    something to know (`bract.report.facts.threats.tiers_that_apply`); ``rule`` says when an image
    counts as leaked; ``configured`` whether the run was made from a configuration of bract's.
    Where several attackers were tried the strongest makes the headline; that choice takes the
    originals, and ``statistics`` says so.

    ``level`` is ``leaked``, ``none-leaked``, ``undecided`` (of some images it cannot be said, and
    of none that it leaked), ``unscored``, ``refused`` or ``not-attacked``. ``sentence`` and
    ``explanation`` are plain words, ``statistics`` names tier, attack, budget and interval; none
    of them calls a run safe.
    """
    overall = [row for row in attacks if row["client"] is None]
    strongest = max(overall, key=lambda row: (*strength(row), _match(row)), default=None)
    words = headline(strongest, attacks, observations, captures=captures, rule=rule)
    tiers = [_tier(tier, overall, observations, applies) for tier in TIERS]
    return {
        **vars(words),
        "next_steps": next_steps(
            words.level,
            strongest,
            observations,
            tiers=[t["tier"] for t in tiers if t["needed"] and not t["tried"]],
            captures=captures,
            configured=configured,
        ),
        "rule": rule.text,
        "thresholds": {
            "ssim": rule.ssim,
            "psnr_margin_db": rule.psnr_margin,
            "level": rule.level,
        },
        "headline": strongest,
        "tiers": tiers,
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
        if headline and same_attack(o, headline) and o["images"] and not o["refused"]
    ]
    return max(mine, key=lambda i: (_match(observations[i]), -i), default=None)


def _match(observation: Facts) -> float:
    cosine = observation["gradient_cosine"]
    return -2.0 if cosine is None else float(cosine)


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
        "undecided": strongest["undecided"] if strongest else 0,
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
        facts["sentence"] = f"{plural(aside, 'upload')} examined, all set aside for a reason."
    elif facts["needed"]:
        facts["sentence"] = "Not tried in this audit."
    elif tier == "adaptive":
        facts["sentence"] = "No defense was on, so there was none to know."
    elif tier == "surrogate":
        facts["sentence"] = "No public images were given to an attacker."
    else:
        facts["sentence"] = "No keys were in use."
    return facts
