"""``comparison.json``: one federation undefended and under each defense.

Redaction works as in `bract.schema.report`: every class lists what a redacted comparison may hold.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue

from bract.config import FederationConfig
from bract.schema.audit import Baseline, Tier
from bract.schema.record import Number, Record, VersionedRecord, names
from bract.schema.report import ScoreSpread, Spread

COMPARISON_SCHEMA: Literal[3] = 3


class ComparisonThresholds(Record):
    """The SSIM from which on an image can count as leaked."""

    public: ClassVar[frozenset[str]] = names("ssim")

    ssim: float


class ComparisonVerdict(Record):
    """Which attackers reconstructed images; ``no-control``: the undefended run gave none."""

    public: ClassVar[frozenset[str]] = names("level sentence limits rule thresholds")

    level: Literal["leaked", "none-leaked", "undecided", "unscored", "not-attacked", "no-control"]
    sentence: str
    limits: str
    rule: str
    thresholds: ComparisonThresholds


class ShownAccuracy(Record):
    """The accuracy that variants are compared by, its interval, and its change to undefended."""

    public: ClassVar[frozenset[str]] = names("value low high change")

    value: Number = None
    low: Number = None
    high: Number = None
    change: Number = None


class RoundAccuracy(Record):
    """Accuracy after one round, of the global model and at the clients."""

    public: ClassVar[frozenset[str]] = names("round accuracy client_accuracy")

    round: int
    accuracy: Number = None
    client_accuracy: Number = None


class RoundLeakage(Record):
    """What the strongest attack got from one round."""

    public: ClassVar[frozenset[str]] = names("round leaked scored ssim_mean")

    round: int
    leaked: int
    scored: int
    ssim_mean: Number = None


class AttackOfTier(Record):
    """Which attack, of which tier."""

    public: ClassVar[frozenset[str]] = names("attack attack_name tier")

    attack: str
    attack_name: str
    tier: Tier


class VariantAttack(AttackOfTier):
    """What one attack got from one variant."""

    images: int
    scored: int
    leaked: int
    undecided: int = 0
    ssim: ScoreSpread
    psnr: ScoreSpread
    label_accuracy: Number = None
    identified_top1: Number = None
    intervals: dict[str, tuple[Number, Number]] = {}
    baselines: dict[str, Baseline] = {}
    gradient_cosine: Number = None
    seconds: Number = None
    iterations: int | None = None
    budget_seconds: Number = None
    restarts: int | None = None

    public: ClassVar[frozenset[str]] = AttackOfTier.public | names(
        """
        images scored leaked undecided ssim psnr label_accuracy identified_top1 intervals baselines
        gradient_cosine seconds iterations budget_seconds restarts
        """
    )


class PairedDifferences(Record):
    """How images differ from the same images undefended, in the mean of the differences."""

    public: ClassVar[frozenset[str]] = names("images ssim psnr")

    images: int
    ssim: Spread
    psnr: Spread


class VariantRow(Record):
    """One variant, whether it finished or not; its leakage is that of the strongest attack.

    ``settings`` are those that the user chose, in words, ``all_settings`` every public one.
    ``report`` is the path of the run's own page.
    """

    variant: str
    title: str
    defenses: list[dict[str, JsonValue]]
    settings: str
    all_settings: str
    error: str | None = None
    report: str | None = None
    status: str | None = None
    config_sha256: str | None = None
    audit_seconds: Number = None
    training_seconds: Number = None
    failures: int = 0
    refused: int = 0
    accuracy: Number = None
    client_accuracy: Number = None
    random_key_accuracy: Number = None
    locked: bool = False
    rounds: list[RoundAccuracy] = []
    attack: AttackOfTier | None = None
    images: int = 0
    scored: int = 0
    leaked: int = 0
    undecided: int = 0
    ssim: ScoreSpread = ScoreSpread()
    psnr: ScoreSpread = ScoreSpread()
    label_accuracy: Number = None
    identified_top1: Number = None
    baseline_ssim: Number = None
    baseline_psnr: Number = None
    attacks: list[VariantAttack] = []
    tiers: list[Tier] = []
    leakage: list[RoundLeakage] = []
    seconds_per_step: Number = None
    seconds_in_defense: Number = None
    seconds_per_round: Number = None
    bytes_per_upload: Number = None
    time_ratio: Number = None
    bytes_ratio: Number = None
    accuracy_change: Number = None
    client_accuracy_change: Number = None
    shown: ShownAccuracy = ShownAccuracy()
    paired: PairedDifferences | None = None

    public: ClassVar[frozenset[str]] = names(
        """
        variant title defenses settings all_settings error report status config_sha256
        audit_seconds training_seconds failures refused accuracy client_accuracy
        random_key_accuracy locked rounds attack images scored leaked undecided ssim
        psnr label_accuracy identified_top1 baseline_ssim baseline_psnr attacks tiers leakage
        seconds_per_step seconds_in_defense seconds_per_round bytes_per_upload time_ratio
        bytes_ratio accuracy_change client_accuracy_change shown paired
        """
    )


class SeedScores(Record):
    """Scores of one image under each seed of a repeated attack."""

    public: ClassVar[frozenset[str]] = names("ssim psnr")

    ssim: list[Number] = []
    psnr: list[Number] = []


class VariantImage(Record):
    """The reconstruction of one image under one variant."""

    public: ClassVar[frozenset[str]] = names("ssim psnr identified_top1 leaked seeds")

    reconstruction: str | None = None
    ssim: Number = None
    psnr: Number = None
    identified_top1: bool | None = None
    label: int | None = None
    leaked: bool | None = None
    seeds: SeedScores = SeedScores()


class ComparedImage(Record):
    """One attacked image under every variant; ``paired``: whether its original is the same."""

    public: ClassVar[frozenset[str]] = names("round client index paired variants")

    round: int
    client: str
    index: int
    original: str | None = None
    true_label: int | None = None
    paired: bool = False
    variants: dict[str, VariantImage] = {}


class ComparisonRun(Record):
    """Where and with what the variants ran."""

    public: ClassVar[frozenset[str]] = names(
        """
        device versions seed audit_devices started training_seconds audit_seconds
        """
    )

    device: str | None = None
    versions: dict[str, str] = {}
    seed: int | None = None
    audit_devices: list[str] = []
    started: str | None = None
    training_seconds: Number = None
    audit_seconds: Number = None


class Comparison(VersionedRecord):
    """The facts of a comparison.

    ``measure`` is ``global`` or ``clients``: whose accuracy is compared. ``tested`` counts the
    examples behind it. ``config`` is the undefended run's.
    """

    kind: ClassVar[str] = "comparison"
    mend: ClassVar[str] = "write it again with `bract compare --resume`"

    schema_version: Literal[3] = Field(default=COMPARISON_SCHEMA, alias="schema")
    bract: str
    written: str
    redacted: bool = False
    name: str
    verdict: ComparisonVerdict
    measure: Literal["global", "clients"]
    tested: int | None = None
    rows: list[VariantRow] = []
    pictures: list[ComparedImage] = []
    notes: list[str] = []
    not_tried: list[str] = []
    config: FederationConfig | None = None
    run: ComparisonRun = ComparisonRun()

    public: ClassVar[frozenset[str]] = names(
        """
        schema_version bract written redacted name verdict measure tested rows pictures
        notes not_tried config run
        """
    )

    def redact(self) -> Self:
        """Return a copy without what shows or describes a single person's image."""
        return super().redact().model_copy(update={"redacted": True})
