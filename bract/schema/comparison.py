"""``comparison.json``: one federation undefended and under each defense, from their reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue

from bract.config import FederationConfig
from bract.schema.reach import LeakCounts
from bract.schema.record import Number, Public, Record, VersionedRecord
from bract.schema.report import RunFacts
from bract.schema.report_rows import AttackRow, ImageFacts, Spread
from bract.schema.verdict import Level

COMPARISON_SCHEMA: Literal[4] = 4

ComparisonLevel = Literal[
    "leaked",
    "none-leaked",
    "undecided",
    "unscored",
    "misdescribed",
    "unconfirmed",
    "not-attacked",
    "no-control",
]
"""What a comparison says, from the most to the least that is known."""


class ComparisonVerdict(Record):
    """What the attacks reconstructed from which variant; ``no-control`` without the undefended one.

    At ``misdescribed`` and ``unconfirmed`` no upload of the undefended run may be judged. ``ssim``
    is the SSIM from which on an image can count as leaked.
    """

    level: Public[ComparisonLevel]
    sentence: Public[str]
    limits: Public[str]
    rule: Public[str]
    ssim: Public[float]


class ShownAccuracy(Record):
    """The accuracy that variants are compared by, its interval, and its change to undefended."""

    value: Public[Number] = None
    low: Public[Number] = None
    high: Public[Number] = None
    change: Public[Number] = None


class VariantRound(LeakCounts):
    """One round: accuracy of the global model and at the clients, and the strongest attack's SSIM.

    Counts are of images.
    """

    round: Public[int]
    accuracy: Public[Number] = None
    client_accuracy: Public[Number] = None
    ssim: Public[Number] = None


class Costs(Record):
    """What a variant costs, and how often the undefended run's costs that is."""

    seconds_per_step: Public[Number] = None
    seconds_in_defense: Public[Number] = None
    seconds_per_round: Public[Number] = None
    bytes_per_upload: Public[Number] = None
    time_ratio: Public[Number] = None
    bytes_ratio: Public[Number] = None


class PairedDifferences(Record):
    """How images differ from the same images undefended, in the mean of the differences."""

    images: Public[int]
    ssim: Public[Spread]
    psnr: Public[Spread]


@dataclass(frozen=True)
class DefenseWords:
    """What a page calls a variant's defenses, by `bract.defenses.words`; the default has none.

    Attributes
    ----------
    title
        ``AdaDefense + Gaussian noise``.
    settings, all_settings
        Those that were chosen, and every public one, in words.
    locked
        Whether a defense keeps part of the model at the clients.
    """

    title: str = "Undefended"
    settings: str = ""
    all_settings: str = ""
    locked: bool = False


class VariantRow(Record):
    """One variant, whether it finished or not.

    ``settings`` are those that were chosen, in words, ``all_settings`` every public one. ``report``
    is the path of the run's own page, ``level`` what it concludes. ``run`` and ``attacks`` are
    those of its report, and ``attack`` is the strongest of these attacks. ``locked`` says that a
    defense keeps part of the model at the clients.
    """

    variant: Public[str]
    title: Public[str]
    defenses: Public[list[dict[str, JsonValue]]]
    settings: Public[str]
    all_settings: Public[str]
    error: Public[str | None] = None
    report: Public[str | None] = None
    level: Public[Level | None] = None
    config_sha256: Public[str | None] = None
    run: Public[RunFacts | None] = None
    failures: Public[int] = 0
    refused: Public[int] = 0
    attacks: Public[list[AttackRow]] = []
    attack: Public[AttackRow | None] = None
    rounds: Public[list[VariantRound]] = []
    accuracy: Public[Number] = None
    client_accuracy: Public[Number] = None
    random_key_accuracy: Public[Number] = None
    locked: Public[bool] = False
    shown: Public[ShownAccuracy] = ShownAccuracy()
    costs: Public[Costs] = Costs()
    paired: Public[PairedDifferences | None] = None

    @property
    def counts(self) -> LeakCounts:
        """Counts of the strongest attack's images."""
        return self.attack or LeakCounts()

    @property
    def images(self) -> int:
        """Images of the strongest attack."""
        return self.attack.images if self.attack else 0


class ComparedImage(Record):
    """One attacked image under every variant, by its report; ``paired``: of the same original.

    ``variants`` holds one image a seed of a repeated attack, the first seed first; their pictures
    are named relative to the comparison.
    """

    round: Public[int]
    client: Public[str]
    index: Public[int]
    original: str | None = None
    true_label: int | None = None
    paired: Public[bool] = False
    variants: Public[dict[str, list[ImageFacts]]] = {}


class Comparison(VersionedRecord):
    """The facts of a comparison.

    ``measure`` is ``global`` or ``clients``: whose accuracy is compared. ``tested`` counts the
    examples behind it. ``config`` is the undefended run's.
    """

    kind: ClassVar[str] = "comparison"
    remedy: ClassVar[str] = "write it again with `bract compare --resume`"

    schema_version: Public[Literal[4]] = Field(default=COMPARISON_SCHEMA, alias="schema")
    bract: Public[str]
    written: Public[str]
    redacted: Public[bool] = False
    name: Public[str]
    verdict: Public[ComparisonVerdict]
    measure: Public[Literal["global", "clients"]]
    tested: Public[int | None] = None
    rows: Public[list[VariantRow]] = []
    pictures: Public[list[ComparedImage]] = []
    notes: Public[list[str]] = []
    not_tried: Public[list[str]] = []
    config: Public[FederationConfig | None] = None

    def redact(self) -> Self:
        """Return a copy without what shows or describes a single person's image."""
        return super().redact().model_copy(update={"redacted": True})
