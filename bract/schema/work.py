"""``round-NNNN.work.json``: how one client trained in one round, as `bract.client.witness` saw it.

It is on the client's own disk, beside what the client kept of the round. Whoever scores an audit
reads it as another party's file: every value is typed and bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bract.disk.named import open_named, unreadable
from bract.errors import BractError
from bract.schema.record import Line, Number, Record, VersionedRecord

WORK_SCHEMA: Literal[2] = 2

MOST_BYTES = 1 << 24
"""Largest file that is read: of a model with thousands of tensors it is a tenth of that."""

MOST_STEPS = 4096
"""Steps of which the number of examples is listed, and changes of hyper-parameters."""

MOST_KEPT = 10_000
"""Examples of a round that a witness keeps at most."""

MOST_THROUGH = 64
"""Operations between a model's output and its loss that are listed."""

OF_PARTS = frozenset({"select", "slice", "index", "split", "unbind", "narrow", "indexselect"})
"""Those that take a part of a tensor, or all of it."""

MOST_NAMES = 10_000
MOST_WEIGHTS = 10_000

Count = Annotated[int, Field(ge=0, le=10**12)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Names = Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES)]
Shape = Annotated[tuple[Count, ...], Field(max_length=16)]
Float = Annotated[float, Field(allow_inf_nan=False)]
Weights = Annotated[tuple[Float, ...], Field(max_length=MOST_WEIGHTS)]
Setting = (
    bool
    | Float
    | Annotated[str, Field(max_length=64)]
    | None
    | Annotated[tuple[Float, ...], Field(max_length=16)]
)
Settings = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Setting], Field(max_length=64)
]


class InputSeen(Record):
    """A tensor that entered the model: the argument's name or place, shape and dtype."""

    name: Line
    shape: Shape
    dtype: Line


class LossTerm(Record):
    """One call of a loss function of PyTorch whose result was differentiated.

    ``name`` is the function's, ``outputs`` and ``targets`` are the shapes that entered it, and
    ``soft`` says that targets of cross entropy are probabilities. ``ignored`` counts targets that
    were left out. ``counted`` is the number of values that a mean divides by. ``factor`` is the
    derivative of what was differentiated by this term: 0.5 where the loss of two accumulated
    passes is halved, None where it could not be found. ``rebuilds`` says that the target is what
    entered the model. ``through`` are operations that changed the model's output before, such as
    ``div`` of a temperature. ``settings`` are further arguments, such as ``beta``.
    """

    name: Line
    reduction: Line = "mean"
    outputs: Shape = ()
    targets: Shape = ()
    soft: bool = False
    weight: Weights | None = None
    pos_weight: Weights | None = None
    label_smoothing: Float = 0.0
    ignored: Count = 0
    counted: Count = 0
    factor: Number = None
    rebuilds: bool = False
    through: Annotated[tuple[Line, ...], Field(max_length=MOST_THROUGH)] = ()
    settings: Settings = {}

    @property
    def scale(self) -> float | None:
        """Return what multiplies the mean loss of the pass; None where it is not known."""
        if self.factor is None:
            return None
        return self.factor if self.reduction == "mean" else self.factor * max(1, self.counted)


class GroupSeen(Record):
    """A group of an optimizer: the parameters that got a gradient, and every hyper-parameter."""

    names: Names = ()
    settings: Settings = {}


class ChangeSeen(Record):
    """Hyper-parameters of a group that differed from those of the step before.

    ``step`` counts from 0.
    """

    step: Count
    group: Count
    settings: Settings


class OptimizerSeen(Record):
    """One optimizer: its class, steps, groups at the first step, and changes at later ones.

    ``resumed`` says that it held moments of earlier steps when it began. ``left_out`` counts
    changes that are not listed.
    """

    name: Line
    module: Line
    steps: Count
    resumed: bool = False
    groups: Annotated[tuple[GroupSeen, ...], Field(max_length=1000)] = ()
    changes: Annotated[tuple[ChangeSeen, ...], Field(max_length=MOST_STEPS)] = ()
    left_out: Count = 0


class ClipSeen(Record):
    """Clipping of gradients by ``norm`` or ``value``.

    ``steps`` counts the calls, ``reached`` those that shortened a gradient, and ``least`` is the
    smallest factor by which one did; None of clipping by value. A ``norm_type`` of 0 is the largest
    absolute value. ``tensors`` counts those that the last call clipped together; 0: not known.
    """

    kind: Literal["norm", "value"]
    bound: Float
    norm_type: Float = 2.0
    steps: Count = 0
    reached: Count = 0
    least: Number = None
    tensors: Count = 0


class LayerSeen(Record):
    """A layer that works otherwise in training mode, in the mode that the first pass had."""

    name: Annotated[str, Field(max_length=500)]
    kind: Line
    training: bool
    rate: Number = None


class LoaderSeen(Record):
    """The `torch.utils.data.DataLoader` that the first pass came from."""

    batch_size: Count | None = None
    drop_last: bool = False
    examples: Count | None = None


class Work(VersionedRecord):
    """What one client did with its model in one round.

    ``steps`` counts steps of every optimizer, ``forwards`` and ``backwards`` passes of the model
    that were differentiated. ``examples`` are those of each step, the first ones. ``passes`` counts
    how often a DataLoader was begun; 0 where none was seen. ``distinct`` counts the examples that
    were kept. ``terms`` is the loss of the first pass; ``even`` says that later ones were alike,
    and ``remainder`` that what was differentiated held more than these terms, as of a proximal
    term. ``autocast`` is the dtype of `torch.autocast`. ``frozen`` are parameters that need no
    gradient, ``moved`` those that an optimizer stepped. ``transforms`` are classes of torchvision
    that drew at random in this process. ``anew`` says that a later pass had inputs that the first
    one did not have, as under augmentation. ``unclear`` says that it was not seen to which pass of
    several a loss belongs; nothing of those was kept. ``computed`` counts passes
    whose inputs another network computed, ``drawn`` those of random numbers; nothing of them was
    kept. ``dropped`` counts passes of the model whose gradients no step took, as of a step that
    `torch.amp.GradScaler` skips; nothing else here is of them. ``blocks`` counts those of a witness
    in the round, of which the last one is here. ``edited`` says that weights changed
    outside of the steps of an optimizer, and ``turned`` that gradients changed between a backward
    pass and a step, by more than one factor. ``ends`` are the model's parameters at the end of the
    training, each in one number (`bract.updates.projection`). ``whole`` says that training ended
    without an error. A file of schema 1, which bract 0.6.0 writes, holds nothing from ``anew`` on,
    nor ``through`` of a term.
    """

    kind: ClassVar[str] = "witnessed work"
    earlier: ClassVar[tuple[int, ...]] = (1,)

    schema_version: Literal[1, 2] = Field(default=WORK_SCHEMA, alias="schema")
    round: Annotated[int, Field(ge=0, le=999_999)]
    torch: Line
    whole: bool = True
    steps: Count = 0
    forwards: Count = 0
    backwards: Count = 0
    passes: Count = 0
    examples: Annotated[tuple[Count, ...], Field(max_length=MOST_STEPS)] = ()
    distinct: Count = 0
    loader: LoaderSeen | None = None
    inputs: Annotated[tuple[InputSeen, ...], Field(max_length=64)] = ()
    terms: Annotated[tuple[LossTerm, ...], Field(max_length=64)] = ()
    even: bool = True
    remainder: bool = False
    optimizers: Annotated[tuple[OptimizerSeen, ...], Field(max_length=64)] = ()
    clips: Annotated[tuple[ClipSeen, ...], Field(max_length=16)] = ()
    autocast: Line | None = None
    layers: Annotated[tuple[LayerSeen, ...], Field(max_length=MOST_NAMES)] = ()
    frozen: Names = ()
    moved: Names = ()
    transforms: Annotated[tuple[Line, ...], Field(max_length=64)] = ()
    anew: bool = False
    unclear: bool = False
    computed: Count = 0
    drawn: Count = 0
    dropped: Count = 0
    blocks: Annotated[int, Field(ge=1, le=10**12)] = 1
    edited: bool = False
    turned: bool = False
    ends: Annotated[
        dict[Annotated[str, Field(max_length=500)], Number], Field(max_length=MOST_NAMES)
    ] = {}

    @property
    def normalised(self) -> int | None:
        """Return the passes that a normalisation in training mode counted; None without one."""
        counts = any(one.kind == "normalisation" and one.training for one in self.layers)
        return self.forwards + self.dropped if counts else None

    @property
    def is_whole(self) -> bool:
        """Return whether the witness looked for everything that is here."""
        return self.schema_version == WORK_SCHEMA


def work_name(server_round: int) -> str:
    """Return the name of a round's file."""
    return f"round-{server_round:04d}.work.json"


def read_work(path: Path) -> Work:
    """Read what a client's witness wrote.

    Raises
    ------
    BractError
        If the file cannot be read, is larger than `MOST_BYTES`, or is no such record.
    """
    try:
        with open_named(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error, BractError) from None
    if len(content) > MOST_BYTES:
        raise BractError(
            f"{path}: is larger than {MOST_BYTES >> 20} MiB, expected what bract.client.witness "
            "writes",
            code="file-damaged",
        )
    return Work.parse_text(content, source=str(path))


def blocks_of(path: Path) -> int:
    """Return how many blocks of a witness a round's file is of; 0 where there is none to read."""
    try:
        return read_work(path).blocks if path.is_file() else 0
    except BractError:
        return 0
