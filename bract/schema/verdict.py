"""Define the report's verdict, and the threat model that it holds for."""

from __future__ import annotations

from typing import Literal

from bract.config.audit import Tier
from bract.schema.reach import LeakCounts
from bract.schema.record import Public, Record
from bract.schema.report_rows import AttackRow

Level = Literal[
    "leaked",
    "none-leaked",
    "undecided",
    "unscored",
    "misdescribed",
    "unconfirmed",
    "refused",
    "not-attacked",
]
"""What a verdict says, from the most to the least that is known.

``misdescribed``: an upload is not what its description says, by what its client kept.
``unconfirmed``: nothing was kept, and an upload lacks what every upload so described has.
"""


UNJUDGED: tuple[Level, ...] = ("misdescribed", "unconfirmed")
"""Levels at which neither a leak nor its absence was shown."""


class Thresholds(Record):
    """The numbers of the rule by which an image counts as leaked."""

    ssim: Public[float]
    psnr_margin_db: Public[float]
    level: Public[float]


class TierVerdict(LeakCounts):
    """What one tier's attackers got; ``needed``: whether the tier has anything to know."""

    tier: Public[Tier]
    meaning: Public[str]
    tried: Public[bool]
    needed: Public[bool]
    attacks: Public[list[str]]
    strongest: Public[str | None]
    identified: Public[int] = 0
    identifiable: Public[int] = 0
    noun: Public[str] = "image"
    sentence: Public[str]


class NextStep(Record):
    """What to do next; ``section`` is the part of the page that a step points to."""

    text: Public[str]
    command: Public[str | None] = None
    section: Public[str | None] = None


class Verdict(Record):
    """What was tried and what was reconstructed; ``headline`` is the strongest attack's row.

    ``sentence`` and ``explanation`` are plain words; ``statistics`` gives the method: the
    attack, its tier and budget, the mean and its interval, and how it was chosen among several.
    """

    level: Public[Level]
    sentence: Public[str]
    explanation: Public[str]
    statistics: Public[str] = ""
    next_steps: Public[list[NextStep]] = []
    rule: Public[str]
    thresholds: Public[Thresholds]
    headline: Public[AttackRow | None] = None
    tiers: Public[list[TierVerdict]]


class SeenRow(Record):
    """Whether the server saw something: yes, no, partly or unknown."""

    question: Public[str]
    answer: Public[Literal["yes", "no", "partly", "unknown"]]
    detail: Public[str]


class ThreatModel(Record):
    """What the server saw, what the attacker was given, and what was not tried.

    ``families`` are the kinds of attack among it of which none was tried, ``rest`` says what of
    attacked uploads was not looked for, ``unread`` which results and uploads could not be read.
    """

    saw: Public[list[SeenRow]]
    not_tried: Public[list[str]]
    families: Public[list[str]] = []
    rest: Public[str] = ""
    unread: Public[str] = ""
    out_of_scope: Public[list[str]]
