"""``bract.yaml``: what a server knows of an app that did not declare it when captures were made.

It is next to ``captures/``. People write it, or ``bract describe``; the audit and the report lay
it over what each capture declares. It holds names and numbers only: the code that ``model`` names
is imported where the reader names it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import model_validator as check_all

from bract.config import DataConfig
from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema
from bract.config.work import Section
from bract.errors import shown
from bract.installed.references import check_reference, is_reference
from bract.schema.declaration import ClientDeclaration, Defenses, Moment, Name, Scale, Side
from bract.schema.described_work import DescribedWork

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
        for kind in _SCHEMAS:
            schema: TableSchema | TextSchema | SignalSchema | None = getattr(self, kind)
            if schema is not None:
                mean, std = schema.feature_moments()
                return {
                    "input": kind,
                    "image_shape": schema.shape,
                    "mean": mean,
                    "std": std,
                    kind: schema,
                    "classes": schema.outputs,
                    "loss": schema.objective,
                }
        return {"input": self.kind, "image_shape": self.shape}

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
        over |= self.work(client).over(declaration, server_round)
        return declaration.updated({k: v for k, v in over.items() if v is not None})

    def work(self, client: str) -> DescribedWork:
        """Return what one client does: its own section laid over that of all."""
        own = self.clients.get(client, DescribedWork()).model_dump(exclude_none=True)
        common = self.training.model_dump(exclude_none=True)
        if own.keys() & {"local_steps", "local_epochs"}:
            common = {k: v for k, v in common.items() if k not in ("local_steps", "local_epochs")}
        return DescribedWork.model_validate(common | own)


def _dotted(content: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and key != "defenses":
            found += _dotted(value, f"{name}.")
        else:
            found.append((name, value))
    return found
