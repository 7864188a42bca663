"""``audit/<attack>/round-R--CLIENT.json``: one attack on one observation, and what it is worth."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from bract.schema.record import Number, Record, VersionedRecord, names
from bract.schema.told import Told

AUDIT_SCHEMA: Literal[4] = 4
"""Version of an audit result; 2 lacked what it depends on and what needs no gradient."""

EXACT_DB = 100.0
"""dB that a perfect copy scores: a mean squared error below 1e-10 is beyond float32 pixels."""

Tier = Literal["oblivious", "adaptive", "surrogate", "colluding"]
TIERS: tuple[Tier, ...] = ("oblivious", "adaptive", "surrogate", "colluding")


def _decibels(value: object) -> object:
    if isinstance(value, float):
        return min(value, EXACT_DB) if not math.isnan(value) and value > -math.inf else None
    return value


Decibels = Annotated[float | None, BeforeValidator(_decibels)]
"""Peak signal-to-noise ratio, capped at `EXACT_DB`; NaN becomes None."""


class Scores(Record):
    """How near a reconstruction is to its original.

    ``rank`` is the original's place when candidates are sorted by distance to the reconstruction,
    from 1; None where identification was left open, as where fewer images were reconstructed than
    there are originals. A perceptual distance that is not available here is None.
    """

    public: ClassVar[frozenset[str]] = names(
        """
        mse psnr ssim lpips_alex lpips_vgg stlpips rank identified_top1 identified_top5
        """
    )

    mse: Number = None
    psnr: Decibels = None
    ssim: Number = None
    lpips_alex: Number = None
    lpips_vgg: Number = None
    stlpips: Number = None
    rank: int | None = None
    identified_top1: bool | None = None
    identified_top5: bool | None = None


class Baseline(Record):
    """Scores of a baseline without the gradient."""

    public: ClassVar[frozenset[str]] = names("mse psnr ssim")

    mse: Number = None
    psnr: Decibels = None
    ssim: Number = None


class Retrieval(Record):
    """Whether a reconstruction singles out its original, from `bract.audit.scoring.chance`.

    ``chance`` bounds the probability that an image made without the gradient comes as near to one
    of the ``choices`` originals; ``least`` is that of an exact copy. ``nearest``: whether
    the original is nearer than each of the ``references`` and than their mean.
    """

    public: ClassVar[frozenset[str]] = names("chance least nearest references choices")

    chance: Number = None
    least: Number = None
    nearest: bool = False
    references: int = 0
    choices: int = 0


class ImageResult(Record):
    """One reconstructed image; file names are relative to the attack's folder.

    ``oracle`` scores the restart that an attacker with the originals would choose. ``baselines``
    are the scores of baselines without the gradient that had the same choice of originals: for this
    very original where every original had an image to itself, else of the same rank. ``retrieval``
    is None where the class has too few reference images.
    """

    index: int
    label: int | None = None
    label_confidence: Number = None
    true_label: int | None = None
    reconstruction: str | None = None
    original: str | None = None
    scores: Scores | None = None
    oracle: Scores | None = None
    baselines: dict[str, Baseline] = {}
    retrieval: Retrieval | None = None


class AuditBudget(Record):
    """What the attack that made the images was allowed on one observation.

    ``iterations`` of one restart, ``seconds`` for all of them; None where there was no limit.
    """

    public: ClassVar[frozenset[str]] = names("iterations seconds restarts max_images")

    iterations: int | None = None
    seconds: Number = None
    restarts: int | None = None
    max_images: int | None = None


class ImageCounts(Record):
    """Images that the client declares, and those that the attack searched for."""

    public: ClassVar[frozenset[str]] = names("declared searched")

    declared: int | None = None
    searched: int | None = None


class StepCounts(Record):
    """Local steps that the client declares, and those that the attack simulated."""

    public: ClassVar[frozenset[str]] = names("declared simulated")

    declared: int | None = None
    simulated: int | None = None


class LayerMatch(Record):
    """How one tensor was matched; ``size`` is its root mean square, the largest tensor's is 1."""

    public: ClassVar[frozenset[str]] = names("cosine size")

    cosine: Number = None
    size: Number = None


class TruthCheck(Record):
    """The client's computation repeated on its true images and compared with the evidence.

    ``exact`` is False where the order of later epochs is not known. ``tried`` holds the cosine in
    other contexts, by name, where the match is poor.
    """

    public: ClassVar[frozenset[str]] = names("cosine scale exact tried")

    cosine: Number = None
    scale: Number = None
    exact: bool = False
    tried: dict[str, Number] = {}


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
    the last tenth of the search. ``told``: the upload's information bound. All but ``truth_check``
    an attacker can measure.
    """

    public: ClassVar[frozenset[str]] = names(
        """
        scale layers zero dead negative unbalanced unsure images steps optimizer norm
        norm_ratio falling told truth_check
        """
    )

    scale: Number = None
    layers: dict[str, LayerMatch] = {}
    zero: Number = None
    dead: Number = None
    negative: int | None = None
    unbalanced: Number = None
    unsure: Number = None
    images: ImageCounts = ImageCounts()
    steps: StepCounts = StepCounts()
    optimizer: str | None = None
    norm: Number = None
    norm_ratio: Number = None
    falling: Number = None
    told: Told | None = None
    truth_check: TruthCheck | None = None


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


class AuditResult(VersionedRecord):
    """One attack on one observation.

    ``members`` are the clients whose mean update it is, empty for a single client's; ``rounds``
    those whose uploads were matched together, without any that could not be used, ``round`` the
    last that was to be, empty where uploads were attacked one by one. ``observer`` is the client
    that attacked in the place of the server, with the global models alone.
    ``chosen_attack`` is the attack that made the images: another one than ``attack`` where that
    chose among several. ``method`` is the recipe that it ran, ``components`` are its parts and
    ``unknowns`` the shapes of what it found besides the images, by name. ``trials`` are all of them
    and ``chosen`` the position of the blind pick. ``not_applicable`` names attacks that were tried
    and cannot be used here, with the reason. Repeats of an attack with other seeds count from 0.
    ``read_as`` is the tier whose reading of the update was attacked: the colluding one reads an
    aggregate obliviously.
    ``basis`` holds versions and digests of what else it depends on: code, capture, truth.
    ``refused`` is the reason where nothing was attacked. ``iterations`` are the steps taken.
    ``candidates`` counts the images among which an original had to be retrieved, itself included.
    ``baselines`` are means over the images.
    """

    kind: ClassVar[str] = "audit"
    mend: ClassVar[str] = "audit the run again or use the bract version that wrote it"

    schema_version: Literal[4] = Field(default=AUDIT_SCHEMA, alias="schema")
    round: int
    client: str
    attack: str
    members: list[str] = []
    rounds: list[int] = []
    observer: str | None = None
    chosen_attack: str | None = None
    method: str | None = None
    components: list[str] = []
    unknowns: dict[str, list[int]] = {}
    trials: list[TrialSummary] = []
    chosen: int = 0
    not_applicable: dict[str, str] = {}
    repeat: int = 0
    tier: Tier = "oblivious"
    read_as: Tier | None = None
    defenses: list[str] = []
    encryption: str = "none"
    num_examples: int | None = None
    local_steps: int | None = None
    settings: dict[str, JsonValue] = {}
    budget: AuditBudget = AuditBudget()
    basis: dict[str, str] = {}
    seed: int | None = None
    device: str | None = None
    seconds: Number = None
    iterations: int | None = None
    final_loss: Number = None
    loss_curve: list[tuple[float, Number]] = []
    gradient_cosine: Number = None
    gradient_residual: Number = None
    diagnosis: Signals | None = None
    refused: str | None = None
    failed: bool = False
    scored: bool = False
    selection: Literal["blind"] = "blind"
    images: list[ImageResult] = []
    label_accuracy: Number = None
    candidates: int | None = None
    baselines: dict[str, Baseline] = {}
    notes: list[str] = []
