"""``bract.yaml``: what a server knows of an app that did not declare it when captures were made.

It is next to ``captures/``. People write it, or ``bract describe``; the audit and the report lay
it over what each capture declares. It holds names and numbers only: the code that ``model`` names
is imported where the reader names it too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic import model_validator as check_all

from bract.config import DataConfig
from bract.config.schedule import ConstantRate, CosineRate
from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema
from bract.config.work import (
    Betas,
    ClassWeights,
    Count,
    Factors,
    LocalWork,
    Momenta,
    NotNegative,
    Probability,
    Rate,
    Section,
    code_of,
)
from bract.disk import check_file
from bract.errors import BractError, listed, one_line, shown
from bract.installed.references import check_reference, is_reference
from bract.parse.strict_yaml import MOST_CHARACTERS, parse_yaml
from bract.registry import unknown
from bract.schema.capture import (
    ClientDeclaration,
    Defenses,
    Moment,
    Name,
    Scale,
    Side,
)

DESCRIPTION = "bract.yaml"
"""Name of the file, in the folder of ``captures/``."""

Shape = tuple[Annotated[int, Field(ge=1, le=64)], Side, Side]


def _named_entries(value: Any) -> Any:
    """Take a defense's bare name as an entry of its defaults."""
    if not isinstance(value, list | tuple):
        return value
    return [{"name": entry} if isinstance(entry, str) else entry for entry in value]


def _reference(name: str) -> str:
    return check_reference(name) if is_reference(name) else name


_SCHEMAS = ("table", "text", "signal")
"""Keys of `InputSection` that hold a schema, by the kind of input that it is of."""


class InputSection(Section):
    """One input of the model.

    ``kind`` is a name of `bract.inputs`, and an image without it. ``shape`` is
    ``[channels, height, width]``. The model sees ``(x - mean) / std`` for pixels x in
    [0, 1], by channel; one value stands for every channel, and without them pixels go in as they
    are. ``table`` is the schema of rows, ``text`` that of texts, ``signal`` that of signals, from
    which shape, statistics and loss follow.
    """

    kind: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    shape: Shape | None = None
    table: TableSchema | None = None
    text: TextSchema | None = None
    signal: SignalSchema | None = None
    mean: Annotated[tuple[Moment, ...], Field(min_length=1, max_length=64)] | None = None
    std: Annotated[tuple[Scale, ...], Field(min_length=1, max_length=64)] | None = None

    @check_all(mode="after")
    def _schema_alone(self) -> Self:
        given = [kind for kind in _SCHEMAS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(
                f"input.{given[0]} and input.{given[1]} are both given; take one of them out"
            )
        if not given:
            return self
        (kind,) = given
        if self.kind not in (None, kind):
            raise ValueError(
                f"input.{kind} is given and input.kind is {shown(self.kind)}; take one of them out"
            )
        if self.shape or self.mean or self.std:
            raise ValueError(f"input.{kind} gives shape, mean and std; take these out")
        return self

    def declared(self) -> dict[str, Any]:
        """Return what a schema declares of a client, by the declaration's field."""
        if self.text is not None:
            mean, std = self.text.feature_moments()
            return {
                "input": "text",
                "image_shape": (self.text.length, 1, 1),
                "mean": mean,
                "std": std,
                "text": self.text,
                "classes": self.text.outputs,
                "loss": self.text.objective,
            }
        if self.signal is not None:
            mean, std = self.signal.feature_moments()
            return {
                "input": "signal",
                "image_shape": self.signal.shape,
                "mean": mean,
                "std": std,
                "signal": self.signal,
                "classes": self.signal.outputs,
                "loss": self.signal.objective,
            }
        if self.table is None:
            return {"input": self.kind, "image_shape": self.shape}
        mean, std = self.table.feature_moments()
        return {
            "input": "table",
            "image_shape": (self.table.width, 1, 1),
            "mean": mean,
            "std": std,
            "table": self.table,
            "classes": self.table.target.outputs,
            "loss": self.table.target.objective,
        }

    @check_all(mode="after")
    def _one_value_a_channel(self) -> Self:
        if (self.mean is None) != (self.std is None):
            given, other = ("mean", "std") if self.std is None else ("std", "mean")
            raise ValueError(f"input.{given} is given and input.{other} is not; give both")
        for name in ("mean", "std"):
            values = getattr(self, name)
            channels = self.shape[0] if self.shape else None
            if values and channels and len(values) not in (1, channels):
                raise ValueError(
                    f"input.{name} has {len(values)} values for {channels} channels; "
                    "give one a channel, or one for all"
                )
        return self


class DescribedWork(LocalWork):
    """What one client does in a round; a client's own section lists what differs.

    Steps follow from ``local_epochs``, ``batch_size`` and each capture's number of examples, or
    are ``local_steps``. ``drop_last`` leaves out a last batch that is smaller than the others.
    ``proximal_mu`` is FedProx's. ``lr_factors`` are what multiplies ``lr`` at each step of a round,
    as a schedule within the round does, and ``momenta`` the momentum of each, of Adam the first of
    its betas. ``max_grad_norm`` is the norm to which every step's gradient is clipped,
    ``max_grad_value`` the absolute value to which each of its values is. ``betas``, ``eps`` and
    ``amsgrad`` are Adam's and AdamW's. ``label_smoothing`` and ``class_weights``, one a class, are
    those of cross entropy; with ``soft_targets`` its targets are probabilities, as of mixup.
    """

    drop_last: bool | None = None
    num_examples: Count | None = None
    proximal_mu: NotNegative | None = None
    lr_factors: Annotated[Factors, Field(min_length=1)] | None = None
    momenta: Annotated[Momenta, Field(min_length=1)] | None = None
    max_grad_norm: Rate | None = None
    max_grad_value: Rate | None = None
    betas: Betas | None = None
    eps: Rate | None = None
    amsgrad: bool | None = None
    label_smoothing: Probability | None = None
    class_weights: ClassWeights | None = None
    soft_targets: bool | None = None

    @check_all(mode="after")
    def _one_way_of_clipping(self) -> Self:
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(
                "max_grad_norm and max_grad_value are both given; one way of clipping is simulated"
            )
        return self

    @check_all(mode="after")
    def _weights_of_labels(self) -> Self:
        if self.soft_targets and self.class_weights is not None:
            raise ValueError(
                "class_weights are given with soft_targets; weights of labels are simulated"
            )
        return self

    @check_all(mode="after")
    def _some_step_moves(self) -> Self:
        if self.lr_factors is not None and not any(self.lr_factors):
            raise ValueError("lr_factors are all 0; give what multiplies lr at each step")
        return self

    @check_all(mode="after")
    def _schedule_says_all(self) -> Self:
        schedule = self.lr_schedule
        if schedule is None or isinstance(schedule, ConstantRate):
            return self
        if self.lr is None:
            raise ValueError("lr_schedule is given without lr; give the learning rate of round 1")
        if isinstance(schedule, CosineRate) and schedule.rounds is None:
            raise ValueError(
                "lr_schedule is a cosine of unknown length; give its rounds, as many as the app ran"
            )
        return self

    @check_all(mode="after")
    def _steps_or_epochs(self) -> Self:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("local_steps and local_epochs are both given; give one of them")
        return self


_AS_DESCRIBED = (
    *("num_examples", "proximal_mu", "max_grad_norm", "max_grad_value"),
    *("momenta", "betas", "eps", "amsgrad"),
    *("label_smoothing", "class_weights", "soft_targets"),
)
"""Fields of `DescribedWork` that a declaration holds as they are."""


class AppDescription(Section):
    """``bract.yaml``: what the server knows of an app's clients, and of the data behind it.

    Every key may be left out; a capture's own declaration holds for keys that are.

    Attributes
    ----------
    model
        ``package.module:callable`` without arguments, or a name of bract's registry.
    activation
        Of a model of the registry.
    input, classes, loss
        What goes in, and what is minimised over how many classes.
    norm_mode
        ``train``: batch normalisation used the batch's statistics; ``eval``: the running ones.
    buffers
        Names of captured tensors that the model holds as buffers, which captures do not separate
        from parameters.
    absent
        Names of the model's parameters and buffers that clients keep to themselves; attacks know
        what was sent of them, or what the model makes.
    own
        Names of parameters that clients train from their own last upload and not from what was
        sent, such as a head of their own that they send all the same.
    names
        Names that the model has for captured tensors, by the captured name, such as those of
        adapters, from which peft takes the adapter's own name out.
    training
        What every client does in a round.
    clients
        What a client, by its name, does otherwise.
    defenses
        What the clients do to their updates: names, or entries with hyper-parameters.
    data
        Images that no client trained on, as in a federation's ``data`` section. Scores are compared
        with them; without them the images that other clients kept are used.
    guessed
        Keys above (``training.lr``) whose value was not declared, with the reason for the value.
        The report names them. Take a key out of this list when you know that its value is right.
    witnessed
        Keys above whose value a consenting client's witness saw (`bract.client.witness`), with the
        clients that did. ``bract describe`` reads them anew.
    unsimulated
        What witnesses saw of the training that no attack simulates, in words. An upload whose
        client kept nothing that confirms the rest gets no verdict.
    """

    model: (
        Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_reference)] | None
    ) = None
    activation: Literal["sigmoid", "relu"] | None = None
    input: InputSection = InputSection()
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    loss: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    norm_mode: Literal["train", "eval"] | None = None
    buffers: Annotated[
        tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=10_000)
    ] = ()
    absent: Annotated[
        tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=10_000)
    ] = ()
    own: Annotated[tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=10_000)] = ()
    names: Annotated[
        dict[
            Annotated[str, Field(max_length=500)],
            Annotated[str, Field(max_length=500)],
        ],
        Field(max_length=10_000),
    ] = {}
    training: DescribedWork = DescribedWork()
    clients: Annotated[dict[Name, DescribedWork], Field(max_length=10_000)] = {}
    defenses: Annotated[Defenses, BeforeValidator(_named_entries)] | None = None
    data: DataConfig | None = None
    guessed: Annotated[dict[str, Annotated[str, Field(max_length=500)]], Field(max_length=100)] = {}
    witnessed: Annotated[
        dict[str, Annotated[str, Field(max_length=500)]], Field(max_length=10_000)
    ] = {}
    unsimulated: Annotated[
        tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=100)
    ] = ()

    @check_all(mode="after")
    def _guesses_are_given(self) -> Self:
        given = self.given()
        for name in ("guessed", "witnessed"):
            for key in getattr(self, name):
                if key not in given:
                    raise ValueError(
                        f"{name} names {shown(key)}, which has no value here; take it out"
                    )
        return self

    def given(self) -> dict[str, Any]:
        """Return every value that is given, by its dotted key, but for guesses and data."""
        content = self.model_dump(
            exclude={"guessed", "witnessed", "unsimulated", "data", "names"}, exclude_none=True
        )
        found = {k: v for k, v in _dotted(content) if v not in ((), {})}
        return found | ({"names": self.names} if self.names else {})

    def declare(
        self, declaration: ClientDeclaration, client: str, server_round: int = 1
    ) -> ClientDeclaration:
        """Return the declaration of a capture of one round with what is described laid over it."""
        shape = self.input.shape or declaration.image_shape
        over: dict[str, Any] = {
            "model": self.model,
            "activation": self.activation,
            "classes": self.classes,
            "loss": self.loss,
            "norm_mode": self.norm_mode,
            "defenses": self.defenses,
            "absent": self.absent or None,
        }
        over |= {k: v for k, v in self.input.declared().items() if v is not None}
        for name in ("mean", "std"):
            values = getattr(self.input, name)
            if values is not None:
                channels = shape[0] if shape else len(values)
                over[name] = values * channels if len(values) == 1 else values
        over |= self._work(declaration, client, server_round)
        return declaration.updated({k: v for k, v in over.items() if v is not None})

    def work(self, client: str) -> DescribedWork:
        """Return what one client does: its own section laid over that of all."""
        own = self.clients.get(client, DescribedWork()).model_dump(exclude_none=True)
        common = self.training.model_dump(exclude_none=True)
        if own.keys() & {"local_steps", "local_epochs"}:
            common = {k: v for k, v in common.items() if k not in ("local_steps", "local_epochs")}
        return DescribedWork.model_validate(common | own)

    def _work(
        self, declaration: ClientDeclaration, client: str, server_round: int
    ) -> dict[str, Any]:
        work = self.work(client)
        examples = work.num_examples or declaration.num_examples
        batch = work.batch_size or declaration.batch_size
        steps = work.local_steps
        if steps is None and work.local_epochs is not None and examples and batch:
            steps = planned_steps(examples, batch, work.local_epochs, bool(work.drop_last))
        found = work.declared(server_round)
        if work.lr_factors is not None:
            # Attacks divide an update by its steps and their mean rate.
            mean = math.fsum(work.lr_factors) / len(work.lr_factors)
            rate = found["lr"] or declaration.lr
            found["lr"] = None if rate is None else rate * mean
            found["lr_factors"] = tuple(factor / mean for factor in work.lr_factors)
        optimizer = found["optimizer"] or declaration.optimizer
        if work.momenta and optimizer not in ("adam", "adamw"):
            # Laws of many steps have one momentum.
            found["momentum"] = math.fsum(work.momenta) / len(work.momenta)
        return found | {
            "batch_size": min(batch, examples) if batch and examples else batch,
            "local_steps": steps,
            **{name: getattr(work, name) for name in _AS_DESCRIBED},
        }


def planned_steps(examples: int, batch_size: int, epochs: int, drop_last: bool = False) -> int:
    """Return the steps of ``epochs`` passes over ``examples``; at least one a pass."""
    batches = examples // batch_size if drop_last else math.ceil(examples / batch_size)
    return epochs * max(1, batches)


def read_description(folder: Path) -> AppDescription | None:
    """Read ``bract.yaml`` of a folder; None where there is none."""
    path = folder / DESCRIPTION
    try:
        with check_file(path, bounded=True).open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read as text: {one_line(error, 200)}", code="file-unreadable"
        ) from None
    return parse_description(text, source=str(path))


def parse_description(text: str, *, source: str = DESCRIPTION) -> AppDescription:
    """Check the text of a description; ``source`` names it in errors."""
    try:
        content = parse_yaml(text)
    except BractError as error:
        raise BractError(f"{source}: {error}", code=error.code) from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise BractError(
            f"{source}: expected keys and values at the top level, "
            f"found a {type(content).__name__}",
            code="text-malformed",
        )
    return build_description(content, source=source)


def build_description(content: Mapping[Any, Any], *, source: str = DESCRIPTION) -> AppDescription:
    """Check a description given as nested dictionaries."""
    try:
        return AppDescription.model_validate(dict(content))
    except (ValidationError, RecursionError) as error:
        raise BractError(f"{source}: {_problems(error)}", code=code_of(error)) from None


_ONE_LINE = math.inf
"""Width of YAML that is never wrapped: what is kept of it is its first line."""


def dump_description(description: AppDescription) -> str:
    """Write a description as YAML that reads back to an equal one, its guesses marked."""
    content = description.model_dump(
        mode="json",
        exclude_none=True,
        exclude_defaults=True,
        exclude={"guessed", "witnessed"},
    )
    if description.data is not None:
        # The name identifies the data, also where it is the default one.
        content["data"] = {"name": description.data.name, **content.get("data", {})}
    lines = ["# What the server knows of this app; `bract audit` lays it over the captures.", ""]
    for key, value in content.items():
        lines += _lines(key, value, key, description.guessed)
    about = {
        "witnessed": "# Seen at clients by their witness; `bract describe` reads these anew.",
        "guessed": "# Nobody declared these; take out what you know to be right.",
    }
    for name, comment in about.items():
        if held := dict(getattr(description, name)):
            lines += ["", comment]
            lines += yaml.safe_dump(
                {name: held}, sort_keys=False, width=_ONE_LINE, allow_unicode=True
            ).splitlines()
    return "\n".join(lines) + "\n"


def _lines(
    key: str, value: Any, dotted: str, guessed: Mapping[str, str], deep: int = 0
) -> list[str]:
    indent = "  " * deep
    name = yaml.safe_dump(key, width=_ONE_LINE).splitlines()[0]
    if isinstance(value, dict) and value:
        inner = [_lines(k, v, f"{dotted}.{k}", guessed, deep + 1) for k, v in value.items()]
        return [f"{indent}{name}:", *(line for part in inner for line in part)]
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        block = yaml.safe_dump(value, sort_keys=False, width=_ONE_LINE, allow_unicode=True)
        return [f"{indent}{name}:", *(f"{indent}{line}" for line in block.splitlines())]
    text = yaml.safe_dump(value, default_flow_style=True, width=_ONE_LINE, allow_unicode=True)
    mark = "  # guessed" if dotted in guessed else ""
    return [f"{indent}{name}: {text.splitlines()[0]}{mark}"]


def _dotted(content: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and key != "defenses":
            found += _dotted(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def _problems(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "something that is nested too deeply"
    lines = []
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        where = ".".join(location)
        if problem["type"] == "extra_forbidden":
            known = [".".join([*location[:-1], key]) for key in _keys_at(location[:-1])]
            lines.append(unknown("key", where, known))
        elif problem["type"] == "value_error":
            said = str(problem["ctx"]["error"])
            inside = location and location[0] not in said
            lines.append(f"{where}: {said}" if inside else said)
        else:
            lines.append(f"{where}: found {shown(problem['input'])}; {problem['msg']}")
    return listed(lines)


def _keys_at(location: list[str]) -> list[str]:
    if location[:1] == ["clients"]:
        return list(DescribedWork.model_fields)
    section: type[BaseModel] = AppDescription
    for part in location:
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        if part == "data":
            annotation = DataConfig
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return list(section.model_fields)
