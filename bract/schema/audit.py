"""``audit/<attack>/round-R--CLIENT.json``: one attack on one observation, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from bract.config.audit import Tier
from bract.schema.check import DescriptionCheck, UploadCheck
from bract.schema.record import Number, Public, Record, VersionedRecord

AUDIT_SCHEMA: Literal[5] = 5
"""Version of an audit result."""

EXACT_DB = 100.0
"""dB that a perfect copy scores: a mean squared error below 1e-10 is beyond float32 pixels."""


def at_cap(values: Sequence[float]) -> int:
    """Count the PSNR that are exact copies: `EXACT_DB` represents any error too small to see."""
    return sum(value >= EXACT_DB - 1e-9 for value in values)


def _decibels(value: object) -> object:
    if isinstance(value, float):
        return min(value, EXACT_DB) if not math.isnan(value) and value > -math.inf else None
    return value


Decibels = Annotated[float | None, BeforeValidator(_decibels)]
"""Peak signal-to-noise ratio, capped at `EXACT_DB`; NaN becomes None."""


class PrimaryScores(Record):
    """The primary score of each input; those of other inputs are None."""

    ssim: Public[Number] = None
    features: Public[Number] = None
    correlation: Public[Number] = None

    @property
    def primary(self) -> float | None:
        """The score by which reconstructions of the input are compared."""
        known = (self.ssim, self.features, self.correlation)
        return next((one for one in known if one is not None), None)


class Scores(PrimaryScores):
    """How near a reconstruction is to its original.

    ``rank`` is the original's place when candidates are sorted by distance to the reconstruction,
    from 1; None where identification was left open, as where fewer images were reconstructed than
    there are originals. A perceptual distance that is not available here is None. Of a row,
    ``features`` is the share of columns that are right, ``exact`` whether all are. Of a text,
    ``features`` is the share of its tokens that were recovered, ``precision`` that of recovered
    tokens that are its own, ``rouge_1``, ``rouge_2`` and ``rouge_l`` the F-measures of ROUGE on
    tokens, ``longest_run`` the most neighbouring tokens in common, and ``rare`` the share
    recovered of tokens in fewer than one public text of a hundred: names and numbers.
    ``order_chance`` is how often the same tokens in random order agree as well with the original's
    order. Of a signal, ``correlation`` is Pearson's over time, the mean over its channels, and
    ``nrmse`` the root of the mean squared error as a share of the declared range.
    """

    mse: Public[Number] = None
    psnr: Public[Decibels] = None
    lpips_alex: Public[Number] = None
    lpips_vgg: Public[Number] = None
    stlpips: Public[Number] = None
    rank: Public[int | None] = None
    identified_top1: Public[bool | None] = None
    identified_top5: Public[bool | None] = None
    exact: Public[bool | None] = None
    precision: Public[Number] = None
    rouge_1: Public[Number] = None
    rouge_2: Public[Number] = None
    rouge_l: Public[Number] = None
    longest_run: Public[int | None] = None
    rare: Public[Number] = None
    order_chance: Public[Number] = None
    nrmse: Public[Number] = None


class Baseline(PrimaryScores):
    """Scores of a baseline without the gradient."""

    mse: Public[Number] = None
    psnr: Public[Decibels] = None
    precision: Public[Number] = None
    nrmse: Public[Number] = None


def best_guess(baselines: Mapping[str, Baseline]) -> tuple[str, float] | None:
    """Return the baseline with the highest primary score, and that score; None without any."""
    known = {name: one.primary for name, one in baselines.items()}
    there = {name: value for name, value in known.items() if value is not None}
    best = max(there, key=there.__getitem__, default=None)
    return None if best is None else (best, there[best])


class CellResult(Record):
    """One cell of a reconstructed row.

    ``value`` is what the attacker found and ``original`` the client's, as text; None where it is
    missing. ``right``: whether they count as equal. ``certainty``: the attacker's own, in [0, 1];
    None where its method has none. ``public_name`` is the column's name where a redacted report may
    show it.
    """

    column: str = ""
    public_name: Public[str] = ""
    value: str | None = None
    original: str | None = None
    right: bool | None = None
    certainty: Number = None


class CalibrationBin(Record):
    """Cells whose certainty is from ``low`` to ``high``: how many, and how many are right."""

    low: Public[float]
    high: Public[float]
    cells: Public[int]
    right: Public[int]


class Retrieval(Record):
    """Whether a reconstruction singles out its original, from the chance
    of `bract.audit.questions.reconstruction`.

    ``chance`` bounds the probability that an image made without the gradient comes as near to one
    of the ``choices`` originals; ``least`` is that of an exact copy. ``nearest``: whether
    the original is nearer than each of the ``references`` and than their mean.
    """

    chance: Public[Number] = None
    least: Public[Number] = None
    nearest: Public[bool] = False
    references: Public[int] = 0
    choices: Public[int] = 0


class ImageResult(Record):
    """One reconstructed image; file names are relative to the attack's folder.

    ``oracle`` scores the restart that an attacker with the originals would choose. ``baselines``
    are the scores of baselines without the gradient that had the same choice of originals: for this
    very original where every original had an image to itself, else of the same rank. ``retrieval``
    is None where the class has too few reference images. A row has ``cells``, the target last.
    """

    index: Public[int]
    label: int | None = None
    label_confidence: Number = None
    true_label: int | None = None
    reconstruction: str | None = None
    original: str | None = None
    scores: Public[Scores | None] = None
    oracle: Public[Scores | None] = None
    baselines: dict[str, Baseline] = {}
    retrieval: Public[Retrieval | None] = None
    cells: Public[list[CellResult]] = []


class AuditBudget(Record):
    """What the attack that made the images was allowed on one observation.

    ``iterations`` of one restart, ``seconds`` for all of them; None where there was no limit.
    """

    iterations: Public[int | None] = None
    seconds: Public[Number] = None
    restarts: Public[int | None] = None
    max_images: Public[int | None] = None


class ImageCounts(Record):
    """Images that the client declares, and those that the attack searched for."""

    declared: Public[int | None] = None
    searched: Public[int | None] = None


class StepCounts(Record):
    """Local steps that the client declares, and those that the attack simulated."""

    declared: Public[int | None] = None
    simulated: Public[int | None] = None


class LayerMatch(Record):
    """How one tensor was matched; ``size`` is its root mean square, the largest tensor's is 1."""

    cosine: Public[Number] = None
    size: Public[Number] = None


class TruthCheck(Record):
    """The client's computation repeated on its true images and compared with the evidence.

    ``exact`` is False where the order of later epochs is not known. ``tried`` holds the cosine in
    other contexts, by name, where the match is poor.
    """

    cosine: Public[Number] = None
    scale: Public[Number] = None
    exact: Public[bool] = False
    tried: Public[dict[str, Number]] = {}


class InformationEstimate(Record):
    """How near to its images an upload may lead: `bract.attacks.problem.identifiability`.

    No upper bound. ``psnr``: dB that the best estimator of the assumed prior expects;
    ``prior_psnr``: dB of a guess that sees no upload; ``numbers``: coordinates that hold
    information; ``pixels``: numbers of the images.
    """

    psnr: Public[float]
    prior_psnr: Public[float]
    numbers: Public[int]
    pixels: Public[int]


class Signals(Record):
    """What was measured about one attack on one observation; what does not apply is None.

    ``scale``: factor by which the evidence is longer than what the images would have caused, along
    their common direction. ``zero``: share of coordinates that are exactly 0. ``dead``: share of
    units that pass nothing on for any image, at the captured parameters. ``negative``,
    ``unbalanced``, ``unsure``: coordinates of the last bias' gradient below 0, the size of its sum
    as a share of the sum of sizes (0 under cross entropy), and its positive part: the probability
    that the model gives to wrong classes, in the mean over examples. ``optimizer``: the declared
    one, where the attack simulates plain SGD in its place. ``norm`` of the evidence, and
    ``norm_ratio`` to the client's first captured one. ``falling``: share by which the loss fell in
    the last tenth of the search. ``bound``: how near to its images the upload can
    lead. ``truth_match``: cosine of the update that the attack simulates at the
    true images. All but the last two an attacker can measure.
    """

    scale: Public[Number] = None
    layers: Public[dict[str, LayerMatch]] = {}
    zero: Public[Number] = None
    dead: Public[Number] = None
    negative: Public[int | None] = None
    unbalanced: Public[Number] = None
    unsure: Public[Number] = None
    images: Public[ImageCounts] = ImageCounts()
    steps: Public[StepCounts] = StepCounts()
    optimizer: Public[str | None] = None
    norm: Public[Number] = None
    norm_ratio: Public[Number] = None
    falling: Public[Number] = None
    estimate: Public[InformationEstimate | None] = None
    truth_check: Public[TruthCheck | None] = None
    truth_match: Public[Number] = None


class TrialSummary(Record):
    """One trial of an attack as the attacker saw it; see `bract.attacks.result.Trial`.

    ``distance`` is one minus the cosine of the match, ``nats`` the posterior where the evidence has
    a likelihood, ``statistics`` the relative error of the batch statistics where the capture holds
    the client's own. ``pass_number`` is called ``pass`` in the file.
    """

    attack: str
    method: str
    components: list[str] = []
    restart: int = 0
    pass_number: int = Field(default=0, alias="pass")
    iterations: int | None = None
    distance: Number = None
    nats: Number = None
    statistics: Number = None
    loss: Number = None
    seconds: Number = None


class Certificate(Record):
    """Evidence, without the original, that a reconstructed image is right.

    Every tensor of the captured update is reproduced to ``residual``, which is within the
    ``rounding`` of float32, by equations that have one solution; ``error`` estimates how far
    rounding moves a pixel in [0, 1] (of `analytic` it bounds it). Capture and declaration are taken
    as true.
    """

    error: Public[float]
    residual: Public[float]
    rounding: Public[float]


class AttackRecord(Record):
    """What an attack found in one observation, but for the images (`Reconstruction.record`).

    ``chosen_attack`` is the attack that made the images, ``method`` the recipe that it ran,
    ``components`` are its parts and ``unknowns`` the shapes of the other variables that it found,
    by name. ``trials`` are all of them and ``chosen`` is the position of the blind pick, of which
    the other fields are. ``not_applicable`` names attacks that were tried and cannot be used here,
    with the reason. ``certificate`` is None where nothing shows that the images are right.
    """

    chosen_attack: Public[str | None] = None
    method: Public[str | None] = None
    components: Public[list[str]] = []
    unknowns: dict[str, list[int]] = {}
    trials: list[TrialSummary] = []
    chosen: int = 0
    not_applicable: dict[str, str] = {}
    settings: dict[str, JsonValue] = {}
    seed: Public[int | None] = None
    seconds: Public[Number] = None
    iterations: int | None = None
    final_loss: Number = None
    loss_curve: Public[list[tuple[float, Number]]] = []
    gradient_cosine: Public[Number] = None
    gradient_residual: Public[Number] = None
    certificate: Public[Certificate | None] = None
    failed: Public[bool] = False


class ScoreRecord(Record):
    """What the scorer measured of one reconstruction.

    ``scored`` counts the images with scores: all of them, or none where the client kept no truth.
    ``target_error`` is the mean absolute error of targets that are numbers, and ``target_baseline``
    that of a guess from what other clients kept.
    ``candidates`` counts the images among which an original had to be retrieved, itself included.
    ``baselines`` are means over the images. ``calibration`` compares the attacker's certainty of
    cells with how many are right.
    """

    images: Public[list[ImageResult]] = []
    scored: Public[int] = 0
    label_accuracy: Public[Number] = None
    target_error: Public[Number] = None
    target_baseline: Public[Number] = None
    candidates: int | None = None
    baselines: Public[dict[str, Baseline]] = {}
    calibration: Public[list[CalibrationBin]] = []
    signals: Public[Signals | None] = None
    notes: Public[list[str]] = []


class Answer(VersionedRecord):
    """What every question writes of one observation, or of a whole run.

    ``round`` and ``client`` are None where the answer is about the run. ``members`` are the clients
    whose mean update it is, empty for a single client's. ``basis`` holds versions and digests of
    what the answer depends on: code, capture, truth. ``refused`` is the reason where the question
    could not be asked. ``checks`` are those of the descriptions of uploads that it rests on.
    ``made`` is when it was written, ISO 8601 text in UTC; None in files of bract 0.6 and earlier.
    """

    kind: ClassVar[str] = "answer"
    remedy: ClassVar[str] = "audit the run again or use the bract version that wrote it"

    question: Public[str]
    input: Public[str] = "image"
    tier: Public[Tier] = "oblivious"
    round: Public[int | None] = None
    client: Public[str | None] = None
    members: list[str] = []
    basis: dict[str, str] = {}
    refused: Public[str | None] = None
    checks: Public[list[UploadCheck]] = []
    made: Public[str | None] = None

    @property
    def where(self) -> str:
        """Return what the answer is of: ``membership (oblivious), round 3, client-1``."""
        where = "the run" if self.round is None else f"round {self.round}, {self.client}"
        return f"{self.asked} ({self.tier}), {where}"

    @property
    def asked(self) -> str:
        """Return what was asked for, by name."""
        return self.question

    @property
    def encrypted(self) -> bool:
        """Return whether the upload was a ciphertext."""
        return False

    def checked(self) -> dict[tuple[int, str], DescriptionCheck]:
        """Return the checks of the uploads that the answer rests on, by round and client."""
        return {(check.round, check.client): check for check in self.checks}

    def all_rounds(self) -> list[int]:
        """Return the rounds whose uploads the answer is about; empty where it is about the run."""
        return [] if self.round is None else [self.round]


class AuditResult(AttackRecord, ScoreRecord, Answer):
    """One attack on one observation.

    ``rounds`` are those whose uploads were matched together, without any that could not be used,
    ``round`` the last that was to be, empty where uploads were attacked one by one. ``observer`` is
    the client that attacked in the place of the server, with the global models alone.
    Repeats of an attack with other seeds count from 0. ``read_as`` is the tier whose reading of the
    update was attacked: the colluding one reads an aggregate obliviously. ``check`` is that of the
    description, made before the attack; None where an upload was not read or is several clients'.
    ``titles`` and ``families`` are those of the attacks for this input that were installed, by
    name; ``portfolio``: whether the attack chooses among several; ``adaptive``: whether one knows
    its defenses.
    """

    kind: ClassVar[str] = "audit"

    schema_version: Literal[5] = Field(default=AUDIT_SCHEMA, alias="schema")
    question: Public[Literal["reconstruction"]] = "reconstruction"
    round: Public[int]
    client: Public[str]
    attack: Public[str]
    rounds: Public[list[int]] = []
    observer: str | None = None
    repeat: Public[int] = 0
    read_as: Public[Tier | None] = None
    defenses: Public[list[str]] = []
    encryption: Public[str] = "none"
    num_examples: int | None = None
    local_steps: int | None = None
    budget: Public[AuditBudget] = AuditBudget()
    device: Public[str | None] = None
    selection: Public[Literal["blind"]] = "blind"
    check: Public[DescriptionCheck | None] = None
    titles: Public[dict[str, str]] = {}
    families: Public[dict[str, list[str]]] = {}
    portfolio: Public[bool] = False
    adaptive: Public[bool] = False

    @property
    def asked(self) -> str:
        """The attack, by name."""
        return self.attack

    @property
    def encrypted(self) -> bool:
        """Return whether the upload was a ciphertext."""
        return self.encryption != "none"

    def checked(self) -> dict[tuple[int, str], DescriptionCheck]:
        """Return the check of the upload that was attacked."""
        return {} if self.check is None else {(self.round, self.client): self.check}

    def all_rounds(self) -> list[int]:
        """Return the rounds whose uploads were matched together, or the one."""
        return [*self.rounds, self.round]
