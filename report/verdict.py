"""The verdict: which attack was strongest, what it shows, and what each tier's attackers got."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bract.config.audit import TIERS, Tier
from bract.report.order import match, strength
from bract.report.reach import worst_upload
from bract.report.words.attack_text import budget_text, choice_text, spread_text
from bract.report.words.formatting import noun_of, plural
from bract.report.words.headline import headline, same_attack, with_unread
from bract.report.words.next_steps import next_steps
from bract.schema.report_rows import AttackRow, ObservationFacts
from bract.schema.verdict import UNJUDGED, Level, Thresholds, TierVerdict, Verdict
from bract.scores.judging import Checked
from bract.scores.leaks import LeakRule

TIER_MEANING: dict[Tier, str] = {
    "oblivious": "An attacker who takes every upload at face value and ignores any defense.",
    "adaptive": (
        "An attacker who knows the defense and its settings, but none of the client's secrets."
    ),
    "surrogate": (
        "An attacker who knows the defense too, and holds public {noun}s like the clients', of "
        "which a generator was made."
    ),
    "colluding": "An attacker who also holds one client's keys.",
}

_NOTHING_TO_KNOW: dict[Tier, str] = {
    "adaptive": "No defense is declared, so there is none to know.",
    "surrogate": "No public {noun}s were given to an attacker.",
    "colluding": "No keys were in use.",
}


def verdict(
    observations: Sequence[ObservationFacts],
    attacks: Sequence[AttackRow],
    *,
    left: int,
    captures: int,
    applies: Collection[str],
    checked: Checked,
    rule: LeakRule,
    configured: bool = True,
    models: Sequence[str] = (),
    sent: Sequence[str] = (),
    unread: Sequence[str] = (),
) -> Verdict:
    """Return the verdict over a run, one for each tier, and what to do next.

    Where several attackers were tried the strongest makes the headline; that choice takes the
    originals, which ``statistics`` states. No sentence calls a run safe.

    Parameters
    ----------
    left
        How many of the captured uploads no attack ran on.
    captures
        Number of uploads that the server holds.
    applies
        Tiers that have something to know (`bract.report.words.threats.tiers_that_apply`).
    checked
        The checks of the run's uploads.
    configured
        Whether the run was made from a configuration of bract's.
    models
        References that the captures declare, which an audit must name.
    sent
        Names of what was sent openly (`bract.report.words.left.openly`).
    unread
        Names of results and uploads that could not be read.
    """
    overall = [row for row in attacks if row.client is None]
    strongest = max(overall, key=lambda row: (*strength(row), match(row)), default=None)
    level = _level(strongest, observations, checked)
    words = headline(
        level,
        strongest,
        attacks,
        observations,
        left=left,
        captures=captures,
        checked=checked,
        rule=rule,
    )
    words = with_unread(words, level, strongest, len(unread))
    unjudged = level in UNJUDGED
    tiers = [_tier(tier, overall, observations, tier in applies, unjudged) for tier in TIERS]
    return Verdict(
        level=level,
        sentence=words.sentence,
        explanation=words.explanation,
        statistics=words.statistics,
        next_steps=next_steps(
            level,
            strongest,
            observations,
            tiers=[t.tier for t in tiers if t.needed and _is_worth(t.tier, observations)],
            captures=captures,
            configured=configured,
            models=models,
            sent=sent,
        ),
        rule=rule.in_words(strongest.noun if strongest else "image"),
        thresholds=Thresholds(ssim=rule.ssim, psnr_margin_db=rule.psnr_margin, level=rule.level),
        headline=strongest,
        tiers=tiers,
    )


def _is_worth(tier: Tier, observations: Sequence[ObservationFacts]) -> bool:
    """Return whether a tier has not been asked for yet, and some upload would not be refused in
    it.
    """
    if any(o.tier == tier for o in observations):
        return False
    return tier != "adaptive" or any(o.adaptive for o in observations)


def _level(
    strongest: AttackRow | None, observations: Sequence[ObservationFacts], checked: Checked
) -> Level:
    if strongest is None:
        return "refused" if observations else "not-attacked"
    # An image that was found leaked, whatever led to it.
    if strongest.leaked:
        return "leaked"
    if checked.level is not None:
        return checked.level
    if not strongest.scored:
        return "unscored"
    return "undecided" if strongest.undecided else "none-leaked"


def worst_observation(
    observations: Sequence[ObservationFacts], headline: AttackRow | None
) -> int | None:
    """Return the position of the observation that leaked most, over all attacks.

    Where nothing was scored, it is the one of the headline attack whose gradient match, the
    attacker's own measure, is best. None without any reconstruction.
    """
    if (worst := worst_upload(observations)) is not None:
        return worst
    mine = [
        i
        for i, o in enumerate(observations)
        if headline and same_attack(o, headline) and o.images and not o.refused
    ]
    return max(mine, key=lambda i: (match(observations[i]), -i), default=None)


def _tier(
    tier: Tier,
    overall: Sequence[AttackRow],
    observations: Sequence[ObservationFacts],
    needed: bool,
    unjudged: bool,
) -> TierVerdict:
    rows = [row for row in overall if row.tier == tier]
    strongest = max(rows, key=strength, default=None)
    noun = noun_of({o.input for o in observations} or {"image"})
    aside = sum(o.tier == tier and bool(o.refused) for o in observations)
    return TierVerdict(
        tier=tier,
        meaning=TIER_MEANING[tier].format(noun=noun),
        tried=bool(rows),
        needed=needed,
        attacks=[row.attack_name for row in rows],
        strongest=strongest.attack_name if strongest else None,
        scored=strongest.scored if strongest else 0,
        leaked=strongest.leaked if strongest else 0,
        undecided=strongest.undecided if strongest else 0,
        unjudged=strongest.unjudged if strongest else 0,
        noun=strongest.noun if strongest else noun,
        identified=strongest.identified if strongest else 0,
        identifiable=strongest.identifiable if strongest else 0,
        sentence=_tier_sentence(
            tier,
            rows,
            strongest,
            aside,
            needed,
            0 if strongest is None else _exact(strongest, observations),
            unjudged,
            noun,
        ),
    )


def _exact(row: AttackRow, observations: Sequence[ObservationFacts]) -> int:
    """Count an attack's images that fit their uploads exactly (`Certificate`)."""
    mine = [o for o in observations if same_attack(o, row) and o.certificate is not None]
    return sum(len(o.images) for o in mine)


def _tier_sentence(
    tier: Tier,
    rows: Sequence[AttackRow],
    strongest: AttackRow | None,
    aside: int,
    needed: bool,
    exact: int,
    unjudged: bool,
    noun: str,
) -> str:
    if strongest and unjudged:
        return (
            f"{strongest.attack_name}: {strongest.images} reconstructions, not judged, since the "
            "description of the uploads is not confirmed"
        )
    if strongest and strongest.scored:
        how = f"{budget_text(strongest)}; {spread_text(strongest)}{choice_text(rows)}"
        return f"{strongest.attack_name}: {how}"
    if strongest:
        proven = f"; {exact} exact for the upload" if exact else ""
        return f"{strongest.attack_name}: {strongest.images} reconstructions, not scored{proven}"
    if aside:
        return f"{plural(aside, 'upload')} examined, all set aside for a reason."
    return "Not tried in this audit." if needed else _NOTHING_TO_KNOW[tier].format(noun=noun)
