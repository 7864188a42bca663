"""The sections of a federation's configuration: data, model, training, strategy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from bract.config.schedule import SCHEDULES, ConstantRate, LrSchedule, scheduled_lr
from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import MOST_TAGS, Task, TextSchema
from bract.config.work import LocalWork, NotNegative, Positive, Probability, Rate, Section
from bract.errors import BractError, shown
from bract.parse.strict_yaml import parse_yaml
from bract.registry import Registry

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


def _quorum(value: Any) -> Any:
    if isinstance(value, str):  # a run config may carry either number as text
        with contextlib.suppress(BractError):
            value = parse_yaml(value)
    share = isinstance(value, float) and 0.0 < value <= 1.0
    if value is None or share or (type(value) is int and value >= 1):
        return value
    raise ValueError(
        "expected a share of the clients asked, above 0 and at most 1.0, or a whole number of them"
    )


Quorum = Annotated[int | float | None, BeforeValidator(_quorum)]
"""A share of the clients asked (a float), or a number of them (an int); None: all."""

Name = Annotated[str, Field(min_length=1, max_length=64)]


def answers_needed(quorum: int | float, asked: int) -> int:
    """Return how many answers of ``asked`` clients are a quorum; a number may be above ``asked``.

    A share is rounded up, but for the error of a float: 0.1 * 30 is above 3 by it.
    """
    return quorum if isinstance(quorum, int) else math.ceil(round(quorum * asked, 6))


def _usable(path: Path) -> Path:
    text = str(path)
    if "\0" in text or len(text.encode(errors="replace")) > 4000:
        raise ValueError("no path: it holds a null character, or more than 4000 bytes")
    if any(len(part.encode(errors="replace")) > 255 for part in path.parts):
        raise ValueError("no path: a name in it has more than 255 bytes")
    return path


class IidPartition(Section):
    """Every client holds a random share of equal size."""

    kind: Literal["iid"] = "iid"


class DirichletPartition(Section):
    """Class shares drawn from Dirichlet(alpha): the smaller alpha, the less alike the clients."""

    kind: Literal["dirichlet"]
    alpha: Annotated[float, Field(gt=0.0)] = 0.5
    min_examples: Positive = 1


class ShardsPartition(Section):
    """Examples sorted by label and cut into shards; each client holds a few of them."""

    kind: Literal["shards"]
    shards_per_client: Positive = 2


class SizesPartition(Section):
    """Clients of stated sizes, drawn at random: ``sizes[i]`` examples for client ``i``."""

    kind: Literal["sizes"]
    sizes: list[Positive]


Partition = Annotated[
    IidPartition | DirichletPartition | ShardsPartition | SizesPartition,
    Field(discriminator="kind"),
]


class TextSection(Section):
    """Texts: their tokenizer, and the columns of a file.

    ``tokenizer`` is the folder that holds ``tokenizer.json``; None takes the words of the embedded
    notes. ``classes`` are the labels, in an order that all clients share. Of the task
    ``token-classification``, ``column`` holds the words of a text and ``label`` as many tags: lists
    in JSON lines, separated by spaces in other files. ``declared`` is a schema that a client
    declared, in place of the tokenizer's own.
    """

    tokenizer: Annotated[Path, AfterValidator(_usable)] | None = None
    length: Annotated[int, Field(ge=2, le=1024)] = 32
    task: Task = "classification"
    column: Annotated[str, Field(min_length=1, max_length=120)] = "text"
    label: Annotated[str, Field(min_length=1, max_length=120)] = "label"
    classes: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    declared: TextSchema | None = None

    @model_validator(mode="after")
    def _classes_of_the_task(self) -> TextSection:
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            raise ValueError(f"classes name {shown(twice)} more than once; name each label once")
        tagged = self.task == "token-classification" and self.classes
        if tagged and not 2 <= len(self.classes) <= MOST_TAGS:
            raise ValueError(
                f"classes are {len(self.classes)}; token-classification takes 2 to {MOST_TAGS} tags"
            )
        return self


class DataConfig(Section):
    """What the clients learn from, and how it is split over them.

    ``normalisation`` is declared here once: training, attack and scoring all use it. ``input``
    names the kind of input, of `bract.inputs`. ``table`` is the schema of rows, ``text`` how
    texts become tokens, ``signal`` the schema of signals where the data set has none of its own.
    """

    name: str = "digits"
    input: Annotated[str, Field(min_length=1, max_length=64)] = "image"
    path: Annotated[Path, AfterValidator(_usable)] | None = None
    download: bool = False
    image_size: Annotated[int, Field(ge=8, le=512)] = 32
    channels: Literal[1, 3] | None = None
    normalisation: Literal["dataset", "none"] = "dataset"
    table: TableSchema | None = None
    text: TextSection | None = None
    signal: SignalSchema | None = None
    validation: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    partition: Partition = IidPartition()

    @model_validator(mode="after")
    def _one_label_to_split_by(self) -> DataConfig:
        tokens = self.text is not None and self.text.task == "token-classification"
        if tokens and self.partition.kind in ("dirichlet", "shards"):
            raise ValueError(
                f"partition.kind is {self.partition.kind}, which splits by one label a text; with "
                "text.task: token-classification set iid or sizes"
            )
        return self


def named_folders(data: DataConfig) -> tuple[Path, ...]:
    """Return the folders and files that a section names on the machine of a client."""
    named = (data.path, None if data.text is None else data.text.tokenizer)
    return tuple(path for path in named if path is not None)


class ModelConfig(Section):
    """The global model: a registered name, or ``package.module:callable``.

    Read from text, ``name`` is never a trusted reference: see `FederationConfig.trusting`.
    """

    name: str = "lenet"
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    init: Literal["default", "uniform"] = "default"


Augmentation = Literal["horizontal-flip", "vertical-flip", "random-crop"]
"""What a client may do to an image before it trains on it."""


def _names(value: Any) -> Any:
    if isinstance(value, str):  # a run config holds no lists, so it carries YAML text
        try:
            value = parse_yaml(value)
        except BractError as error:
            raise ValueError(str(error)) from None
        return [value] if isinstance(value, str) else value
    return [] if value is None else value


def _each_once(names: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
    if len(set(names)) < len(names):
        raise ValueError(f"{shown(names)} names one twice; name each once")
    return names


class PrivateConfig(Section):
    """Per-example differential privacy of a client's training, by Opacus.

    Give the noise by ``noise_multiplier``, or by ``epsilon``: then it is the smallest noise for
    which all rounds together are (epsilon, delta)-private for each example. Every step draws each
    example with probability ``batch_size`` / examples (Poisson), as the ``accountant`` assumes.
    ``clipping``: ``auto`` and ``each`` both compute every example's gradient in a pass of its own.
    """

    epsilon: Rate | None = None
    noise_multiplier: Rate | None = None
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    max_grad_norm: Rate = 1.0
    accountant: Literal["rdp", "prv"] = "rdp"
    clipping: Literal["auto", "each"] = "auto"

    @model_validator(mode="after")
    def _one_measure(self) -> PrivateConfig:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either epsilon or noise_multiplier, not both and not neither")
        return self

    def declared(self) -> dict[str, Any]:
        """Return the defense that a protocol declares, without what it leaves open."""
        content = self.model_dump(exclude={"clipping"}, exclude_none=True)
        return {"name": "per-example", **content}


class TrainingConfig(LocalWork):
    """What a client does with the model in one round.

    ``fedsgd`` uploads the gradient of one batch; ``fedavg`` trains for ``local_steps`` batches,
    or ``local_epochs`` passes where ``local_steps`` is not given, and uploads the difference.
    ``update_dtype`` rounds a defended update to half its bytes before it is sent.
    The augmentations are those of `bract.client.augmentation`.
    """

    algorithm: Literal["fedavg", "fedsgd"] = "fedavg"
    batch_size: Positive = 8
    local_epochs: Positive = 1
    local_steps: Positive | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Rate = 0.1
    lr_schedule: LrSchedule = ConstantRate(kind="constant")
    momentum: Probability = 0.0
    weight_decay: NotNegative = 0.0
    augmentation: Annotated[
        tuple[Augmentation, ...],
        BeforeValidator(_names, json_schema_input_type=list[Augmentation] | None),
        AfterValidator(_each_once),
    ] = ()
    dropout: Probability | None = None
    private: PrivateConfig | None = None
    update_dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def at(self, server_round: int, rounds: int) -> TrainingConfig:
        """Return what a client does in one round of a federation of ``rounds`` rounds.

        ``lr`` is that of the round, and constant.
        """
        rate = scheduled_lr(self.lr, self.lr_schedule, server_round, rounds)
        return self.model_copy(update={"lr": rate, "lr_schedule": ConstantRate(kind="constant")})


class StrategySection(Section):
    """What every strategy has; a subclass adds its ``name`` and the strategy's own arguments.

    A package that adds a strategy registers such a subclass, whose ``name`` is a ``Literal`` and
    whose ``implementation`` names the strategy itself: ``package.module:Class``, a subclass
    of `bract.strategies.FedAvg`. It is imported by the server alone.

    ``quorum``: share (0.8) or number (8) of the clients asked whose answers close a round after
    ``grace`` seconds; null waits for all. ``timeout`` closes it in any case. Late answers are
    refused. ``joins``: the first round of clients that do not train from round 1 on, by their
    names.
    """

    implementation: ClassVar[str] = ""

    server_lr: Annotated[float, Field(gt=0.0)] = 1.0
    fraction: Fraction = 1.0
    tolerate_failures: bool = False
    timeout: Annotated[float, Field(gt=0.0)] = 600.0
    quorum: Quorum = None
    grace: NotNegative = 5.0
    joins: dict[Name, Positive] = {}

    def quorum_of(self, asked: int) -> int:
        """Return how many answers of ``asked`` clients close a round; all without a quorum."""
        return asked if self.quorum is None else answers_needed(self.quorum, asked)

    @property
    def scored(self) -> Literal["accuracy", "loss"] | None:
        """Return which score of fused models (`bract.protocol.fused`) a round asks for; None: of
        none.
        """
        return None


class FedAvgConfig(StrategySection):
    """Average the updates, by number of examples or uniformly.

    ``max_share`` is the largest weight of one client among three or more.
    """

    name: Literal["fedavg"] = "fedavg"
    weighting: Literal["examples", "uniform"] = "examples"
    max_share: Fraction = 0.75


class FedProxConfig(StrategySection):
    """FedAvg whose clients add ``proximal_mu / 2 * ||w - w_global||^2`` to their loss."""

    name: Literal["fedprox"]
    weighting: Literal["examples", "uniform"] = "examples"
    max_share: Fraction = 0.75
    proximal_mu: Annotated[float, Field(ge=0.0)] = 0.1


class FedBoostingConfig(StrategySection):
    """Weigh each client by how its fused model does on every client's validation split.

    ``training_scores``: whether its score on its own training data counts too.
    """

    name: Literal["fedboosting"]
    weighting: Literal["softmax", "proportional"] = "softmax"
    signal: Literal["accuracy", "loss"] = "accuracy"
    training_scores: bool = True
    fusing: Literal["fixed", "random"] = "fixed"
    p_hat: Annotated[float, Field(gt=0.5, le=1.0)] = 0.9

    @property
    def scored(self) -> Literal["accuracy", "loss"]:
        """The ``signal``: the other score stays at the clients."""
        return self.signal


def _plugin_problem(name: str, entry: object) -> str | None:
    if not (isinstance(entry, type) and issubclass(entry, StrategySection)):
        return f"{entry!r} is no subclass of bract.config.StrategySection; name one that is"
    field = entry.model_fields.get("name")
    if field is None or get_args(field.annotation) != (name,):
        return f'{entry.__name__} has no name: Literal["{name}"]; add it'
    if ":" not in entry.implementation:
        return f"{entry.__name__}.implementation is no package.module:Class; name the strategy"
    return None


STRATEGY_SECTIONS: Registry[type[StrategySection]] = Registry(
    "strategy", group="bract.strategies", check=_plugin_problem
)
STRATEGY_SECTIONS.register("fedavg")(FedAvgConfig)
STRATEGY_SECTIONS.register("fedboosting")(FedBoostingConfig)
STRATEGY_SECTIONS.register("fedprox")(FedProxConfig)


def _strategy_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("name", "fedavg")
    return getattr(value, "name", None)


def _with_plugins(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a section against bract's own strategies, or those of installed packages."""
    name = _strategy_name(value)
    if name in _OWN or not isinstance(name, str) or name not in STRATEGY_SECTIONS:
        return check(value)
    # A tagged choice, so that errors have the location of those of bract's own sections.
    tagged: Any = Annotated[STRATEGY_SECTIONS[name], Tag(name)]
    choice: Any = Annotated[
        tagged | Annotated[FedAvgConfig, Tag("fedavg")], Discriminator(_strategy_name)
    ]
    return TypeAdapter(choice).validate_python(value)


_OWN = ("fedavg", "fedboosting", "fedprox")

StrategyConfig = Annotated[
    Annotated[FedAvgConfig, Tag("fedavg")]
    | Annotated[FedBoostingConfig, Tag("fedboosting")]
    | Annotated[FedProxConfig, Tag("fedprox")],
    Discriminator(_strategy_name),
    WrapValidator(_with_plugins),
    SerializeAsAny(),
]


KINDS: dict[tuple[str, ...], Mapping[str, type[BaseModel]] | Registry[type[StrategySection]]] = {
    ("strategy",): STRATEGY_SECTIONS,
    ("training", "lr_schedule"): SCHEDULES,
    ("data", "partition"): {
        "iid": IidPartition,
        "dirichlet": DirichletPartition,
        "shards": ShardsPartition,
        "sizes": SizesPartition,
    },
}
"""Where the value of one key (``name``, ``kind``) chooses the section's class, and the choices."""
