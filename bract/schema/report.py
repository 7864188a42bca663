"""``report.json``: the facts of one run, as `bract report` writes them and the page shows them.

Every class lists in ``public`` the fields that a redacted report may hold; unlisted fields, also
later ones, are reset to their defaults. The module is long because the file is: one
class for each of its tables.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue

from bract.config import FederationConfig
from bract.schema.audit import (
    AuditBudget,
    Baseline,
    Decibels,
    Retrieval,
    Scores,
    Signals,
    Tier,
)
from bract.schema.metrics import BoostingRow, ClientRow
from bract.schema.record import Number, Record, VersionedRecord, names

REPORT_SCHEMA: Literal[4] = 4

Reason = Literal["ssim", "identified"]
"""The part of the rule by which an image leaked."""

PUBLIC_SETTINGS = names(
    """
        chosen criterion dropout restart restarts images bn boxed history labels latent line_search
        lr max_unknowns momentum objective optimizer polish_steps pool schedule signed
        surrogate tolerance tv unknowns_rate unroll weighting width
        """
)
"""An attack's settings that a redacted report may hold: hyper-parameters, and what was chosen."""


class Spread(Record):
    """A mean, and its 95 % interval over clients; None without one."""

    public: ClassVar[frozenset[str]] = names("mean low high")

    mean: Number = None
    low: Number = None
    high: Number = None


class ScoreSpread(Spread):
    """The spread of a score, its best single value, and how many values are behind it.

    ``missing`` counts scored images that have no finite one, ``at_cap`` the PSNR that are exact
    copies: `EXACT_DB` represents any error that is too small to see.
    """

    public: ClassVar[frozenset[str]] = Spread.public | {"best", "missing", "count", "at_cap"}

    best: Number = None
    missing: int = 0
    count: int = 0
    at_cap: int = 0


class SsimPsnr(Record):
    """One SSIM and one PSNR."""

    public: ClassVar[frozenset[str]] = names("ssim psnr")

    ssim: Number = None
    psnr: Decibels = None


class Margins(Record):
    """How far images are above the best baseline of each, without the gradient."""

    public: ClassVar[frozenset[str]] = names("ssim psnr")

    ssim: Spread
    psnr: Spread


class RunFacts(Record):
    """What ran, when and where; moments are ISO 8601 text."""

    name: str
    status: str = "unknown"
    rounds_done: int = 0
    rounds_planned: int | None = None
    started: str | None = None
    finished: str | None = None
    training_seconds: Number = None
    audit_seconds: Number = None
    device: str | None = None
    audit_devices: list[str] = []
    command: str | None = None
    flower_run_id: str | None = None
    versions: dict[str, str] = {}
    seed: int | None = None
    audit_seeds: list[int] = []

    public: ClassVar[frozenset[str]] = names(
        """
        name status rounds_done rounds_planned started finished training_seconds
        audit_seconds device audit_devices command flower_run_id versions seed audit_seeds
        """
    )


class ImageFacts(Record):
    """One reconstructed image; picture paths are relative to the run directory.

    ``baseline`` is the best of the baselines without the gradient for this image. ``leaked`` is
    None where it was not scored, and where that cannot be ``decided``.
    """

    index: int
    label: int | None = None
    label_confidence: Number = None
    true_label: int | None = None
    reconstruction: str | None = None
    original: str | None = None
    scores: Scores | None = None
    oracle: Scores | None = None
    baseline: SsimPsnr = SsimPsnr()
    leaked: bool | None = None
    leaked_by: Reason | None = None
    decided: bool = True
    retrieval: Retrieval | None = None

    public: ClassVar[frozenset[str]] = names(
        "index scores oracle baseline leaked leaked_by decided retrieval"
    )


class Finding(Record):
    """Why an attack got no further, and who could have measured it."""

    public: ClassVar[frozenset[str]] = names("code text source")

    code: str
    text: str
    source: Literal["attacker", "scorer"]


class ObservationFacts(Record):
    """One attack on one observation; ``scored``, ``leaked`` and ``undecided`` count its images.

    ``attack`` separates attacks on a round's aggregate, or on several ``rounds``, from those
    on single uploads; ``budget``, ``read_as`` and the rest are as in the audit's result.
    """

    attack: str
    attack_name: str
    chosen_attack: str
    method: str
    method_name: str
    components: list[str] = []
    tried: list[str] = []
    repeat: int
    tier: Tier
    read_as: Tier
    round: int
    rounds: list[int] = []
    client: str
    defenses: list[str] = []
    encryption: str = "none"
    settings: dict[str, JsonValue] = {}
    budget: AuditBudget = AuditBudget()
    seed: int | None = None
    device: str | None = None
    seconds: Number = None
    selection: str = "blind"
    gradient_cosine: Number = None
    gradient_residual: Number = None
    loss_curve: list[tuple[float, Number]] = []
    refused: str | None = None
    failed: bool = False
    notes: list[str] = []
    images: list[ImageFacts] = []
    scored: int = 0
    leaked: int = 0
    undecided: int = 0
    diagnosis: list[Finding] = []
    signals: Signals | None = None
    label_accuracy: Number = None
    baselines: dict[str, Baseline] = {}
    best_baseline: SsimPsnr = SsimPsnr()

    public: ClassVar[frozenset[str]] = names(
        """
        attack attack_name chosen_attack method method_name components tried repeat tier read_as
        round rounds client defenses encryption budget seed device seconds selection gradient_cosine
        gradient_residual loss_curve refused failed notes images scored leaked undecided diagnosis
        signals
        label_accuracy baselines best_baseline
        """
    )

    def redact(self) -> Self:
        """Return a copy with the settings of `PUBLIC_SETTINGS` alone."""
        kept = {name: v for name, v in self.settings.items() if name in PUBLIC_SETTINGS}
        return super().redact().model_copy(update={"settings": kept})


class AttackRow(Record):
    """One attack of one tier over a client's observations; ``client`` is None over all of them.

    ``methods`` counts what made the images where that goes by another name than the attack;
    ``chose``: whether the attack chose it among several, by its own loss. Scores are means over
    images; ``intervals`` holds those of the scores that are not spreads themselves.
    """

    attack: str
    attack_name: str
    tier: Tier
    client: str | None = None
    chose: bool = False
    methods: dict[str, int] = {}
    repeats: int
    uploads: int
    clients: int
    rounds: list[int]
    images: int
    scored: int
    failed: int
    leaked: int
    undecided: int = 0
    leaked_share: Spread
    ssim: ScoreSpread
    psnr: ScoreSpread
    margin: Margins
    mse: Number = None
    lpips_alex: Number = None
    lpips_vgg: Number = None
    stlpips: Number = None
    identified_top1: Number = None
    identified_top5: Number = None
    label_accuracy: Number = None
    intervals: dict[str, tuple[Number, Number]] = {}
    oracle: SsimPsnr
    baselines: dict[str, Baseline] = {}
    gradient_cosine: Number = None
    seconds: Number = None
    iterations: int | None = None
    budget_seconds: Number = None
    restarts: int | None = None

    public: ClassVar[frozenset[str]] = names(
        """
        attack attack_name tier client chose methods repeats uploads clients rounds images scored
        failed leaked undecided leaked_share ssim psnr margin mse lpips_alex lpips_vgg stlpips
        identified_top1 identified_top5 label_accuracy intervals oracle baselines
        gradient_cosine seconds iterations budget_seconds restarts
        """
    )


class StrongestAttack(Record):
    """What the strongest attack on one client got."""

    public: ClassVar[frozenset[str]] = names(
        """
        attack attack_name tier images scored leaked ssim psnr
        """
    )

    attack: str
    attack_name: str
    tier: Tier
    images: int
    scored: int
    leaked: int
    ssim: ScoreSpread
    psnr: ScoreSpread


class ClientFacts(Record):
    """One client: its training, its captures, and what the strongest attack got."""

    client: str
    rounds: int = 0
    examples: int | None = None
    seconds_per_round: Number = None
    encryption_seconds_per_round: Number = None
    clipped: Number = None
    train_loss: Number = None
    validation_accuracy: Number = None
    captures: int = 0
    attacked: int = 0
    refused: int = 0
    failures: int = 0
    strongest: StrongestAttack | None = None
    worst_round: int | None = None

    public: ClassVar[frozenset[str]] = names(
        """
        client rounds examples seconds_per_round encryption_seconds_per_round clipped
        train_loss validation_accuracy captures attacked refused failures strongest
        worst_round
        """
    )


class RoundFacts(Record):
    """One round of training; ``failures`` counts clients that did not answer."""

    public: ClassVar[frozenset[str]] = names("round seconds loss accuracy clients failures")

    round: int
    seconds: Number = None
    loss: Number = None
    accuracy: Number = None
    clients: dict[str, ClientRow] = {}
    failures: int = 0


class BoostingFacts(BoostingRow):
    """What FedBoosting measured in one round."""

    public: ClassVar[frozenset[str]] = BoostingRow.public | {"round"}

    round: int


class LeakageRow(Record):
    """How much of one scored observation leaked."""

    public: ClassVar[frozenset[str]] = names(
        """
        attack attack_name tier round client scored leaked ssim_mean ssim_best psnr_mean
        psnr_at_cap baseline_ssim
        """
    )

    attack: str
    attack_name: str
    tier: Tier
    round: int
    client: str
    scored: int
    leaked: int
    ssim_mean: Number = None
    ssim_best: Number = None
    psnr_mean: Number = None
    psnr_at_cap: int = 0
    baseline_ssim: Number = None


class Thresholds(Record):
    """The numbers of the rule by which an image counts as leaked."""

    public: ClassVar[frozenset[str]] = names("ssim psnr_margin_db level")

    ssim: float
    psnr_margin_db: float
    level: float


class TierVerdict(Record):
    """What one tier's attackers got; ``needed``: whether the tier has anything to know."""

    public: ClassVar[frozenset[str]] = names(
        """
        tier meaning tried needed attacks strongest scored leaked undecided sentence
        """
    )

    tier: Tier
    meaning: str
    tried: bool
    needed: bool
    attacks: list[str]
    strongest: str | None
    scored: int
    leaked: int
    undecided: int = 0
    sentence: str


class NextStep(Record):
    """What to do next; ``section`` is the part of the page that a step points to."""

    public: ClassVar[frozenset[str]] = names("text command section")

    text: str
    command: str | None = None
    section: str | None = None


class Verdict(Record):
    """What was tried, and the reconstructions; ``headline`` is the strongest attack's row.

    ``sentence`` and ``explanation`` are plain words; ``statistics`` gives the method: the
    attack, its tier and budget, the mean and its interval, and how it was chosen among several.
    """

    public: ClassVar[frozenset[str]] = names(
        """
        level sentence explanation statistics next_steps rule thresholds headline tiers
        """
    )

    level: Literal["leaked", "none-leaked", "undecided", "unscored", "refused", "not-attacked"]
    sentence: str
    explanation: str
    statistics: str = ""
    next_steps: list[NextStep] = []
    rule: str
    thresholds: Thresholds
    headline: AttackRow | None = None
    tiers: list[TierVerdict]


class RefusedFacts(Record):
    """An observation that was not attacked, and why."""

    public: ClassVar[frozenset[str]] = names("attack_name tier round client refused")

    attack_name: str
    tier: Tier
    round: int
    client: str
    refused: str


class FailureFacts(Record):
    """A client that did not answer in a round, and why."""

    public: ClassVar[frozenset[str]] = names("round client reason")

    round: int
    client: str
    reason: str


class SkippedFile(Record):
    """A file of the run directory that could not be used, and why."""

    public: ClassVar[frozenset[str]] = names("file reason")

    file: str
    reason: str


class SeenRow(Record):
    """Whether the server saw something: yes, no, partly or unknown."""

    public: ClassVar[frozenset[str]] = names("question answer detail")

    question: str
    answer: Literal["yes", "no", "partly", "unknown"]
    detail: str


class ThreatModel(Record):
    """What the server saw, what the attacker was given, and what was not tried."""

    public: ClassVar[frozenset[str]] = names("saw not_tried out_of_scope")

    saw: list[SeenRow]
    not_tried: list[str]
    out_of_scope: list[str]


class Report(VersionedRecord):
    """The facts of one run.

    ``written`` is ISO 8601 text. ``worst`` is the position in ``observations`` of the one that
    leaked most. Scores are those of the blind selection; ``oracle`` is given in addition.
    """

    kind: ClassVar[str] = "report"
    mend: ClassVar[str] = "write it again with `bract report`"

    schema_version: Literal[4] = Field(default=REPORT_SCHEMA, alias="schema")
    bract: str
    written: str
    redacted: bool = False
    run: RunFacts
    config: FederationConfig | None = None
    config_sha256: str | None = None
    verdict: Verdict
    worst: int | None = None
    rounds: list[RoundFacts] = []
    boosting: list[BoostingFacts] = []
    leakage: list[LeakageRow] = []
    clients: list[ClientFacts] = []
    attacks: list[AttackRow] = []
    observations: list[ObservationFacts] = []
    captures: int = 0
    refused: list[RefusedFacts] = []
    failures: list[FailureFacts] = []
    skipped: list[SkippedFile] = []
    notes: list[str] = []
    threat_model: ThreatModel

    public: ClassVar[frozenset[str]] = names(
        """
        schema_version bract written redacted run config config_sha256 verdict worst rounds
        boosting leakage clients attacks observations captures refused failures skipped
        notes threat_model
        """
    )

    def redact(self) -> Self:
        """Return a copy without what shows or describes a single person's image."""
        return super().redact().model_copy(update={"redacted": True})
