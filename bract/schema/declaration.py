"""Define what the protocol declares of a client's computation, and what a client claims of it.

Everything is typed and bounded, because a capture may come from a third party.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.dataclasses import dataclass

from bract.config.client_names import check_name
from bract.config.faults import first_problem
from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema
from bract.config.work import (
    Augmentations,
    Betas,
    ClassWeights,
    Count,
    Factors,
    Momenta,
    NotNegative,
    Probability,
    Rate,
)
from bract.errors import BractError, one_line
from bract.installed.references import TrustedReference, is_reference
from bract.schema.record import Line

MOST_FEATURES = 65_536
"""Most channels of an image, or features of a row."""


def _known_as(name: str) -> str:
    try:
        return check_name(name)
    except BractError as error:
        raise ValueError(str(error)) from None


def _bounded(value: Any) -> Any:
    """Refuse a hyper-parameter that is no bounded scalar, or short list of those."""
    if isinstance(value, list | tuple):
        if len(value) > 64 or any(isinstance(item, list | tuple | dict) for item in value):
            raise ValueError("expected a list of at most 64 numbers or short texts")
        return [_bounded(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) <= 1e18:  # NaN is no smaller than that
        return value
    if isinstance(value, str) and len(value) <= 200:
        return value
    raise ValueError(f"expected a finite number or a short text, found {one_line(value, 40)}")


def _defense(entry: dict[str, Any]) -> dict[str, Any]:
    name = entry.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 64 or not name.isprintable():
        raise ValueError("a defense has a `name` of 1 to 64 characters")
    if len(entry) > 64 or any(len(key) > 64 for key in entry):
        raise ValueError(f"defense {name!r} has too many or too long keys")
    return {key: _bounded(value) for key, value in entry.items()}


def _keep_trust(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check text, and keep a `TrustedReference` one: this process made it, no parser does."""
    found = check(value)
    return value if isinstance(value, TrustedReference) else found


ModelName = Annotated[Line, Field(max_length=200)]


Features = Annotated[int, Field(ge=1, le=MOST_FEATURES)]


Side = Annotated[int, Field(ge=1, le=4096)]


Text = Annotated[str, Field(max_length=64)]


Reason = Annotated[str, Field(max_length=2000)]


Moment = Annotated[float, Field(allow_inf_nan=False)]


Scale = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


Name = Annotated[str, AfterValidator(_known_as)]


DefenseEntry = Annotated[dict[str, Any], AfterValidator(_defense)]


Defenses = Annotated[tuple[DefenseEntry, ...], Field(max_length=16)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ClientDeclaration:
    """What the protocol declares about a client's computation; the server knows all of it.

    Attacks on running deployments usually fail because one of these was not recorded. A value
    that was not declared is ``None``; an attack that needs it reports that.

    Attributes
    ----------
    algorithm
        ``fedsgd``: the update is the gradient of one batch. ``fedavg``: it is
        ``w_global - w_local`` after ``local_steps`` steps.
    model
        Registered name or ``package.module:callable``, and the activation. A reference is
        imported only where `trusting` found it on its user's list.
    input
        Name of the kind of input (`bract.inputs`).
    image_shape
        ``(C, H, W)`` of one input; of an encoded row ``(features, 1, 1)``, of a signal
        ``(channels, 1, length)``.
    classes
        Number of classes ``C``; outputs of a model that predicts numbers.
    mean, std
        Per-channel normalisation: the model saw ``(x - mean) / std`` for pixels x in [0, 1].
    table
        Schema of the rows; None for other inputs.
    text
        Schema of the texts; None for other inputs.
    signal
        Schema of the signals; None for other inputs.
    loss, optimizer, lr, momentum
        The client's objective and optimizer; ``lr`` is that of this round.
    weight_decay
        lambda >= 0: every local step follows the gradient plus ``lambda w``.
    proximal_mu
        FedProx's mu >= 0: every local step follows the gradient plus ``mu (w - w_global)``.
    lr_factors
        What multiplies ``lr`` at each local step, with a mean of 1; empty where all are 1.
    momenta
        Momentum at each local step, of Adam and AdamW the first of the betas; empty where all steps
        have one, which ``momentum`` or ``betas`` gives.
    max_grad_norm, max_grad_value
        Norm to which the gradient of every local step is clipped, or absolute value to which each
        of its values is; None: not clipped.
    betas, eps, amsgrad
        Of Adam and AdamW, and ``eps`` of RMSprop; None: PyTorch's own. With ``amsgrad`` they divide
        by the largest second moment so far.
    label_smoothing
        Share in [0, 1) of every label that is spread over all classes.
    class_weights
        What each class counts in the loss, ``(classes,)``; None where all count alike.
    soft_targets
        Whether the targets of cross entropy are probabilities of all classes, as of mixup.
    local_steps, batch_size, num_examples
        Steps taken this round, examples a step, and distinct examples used.
    augmentation
        What was done at random to every image before it was trained on, by name, in order; the
        images behind an update are the augmented ones.
    absent
        Names of the model's parameters and buffers that clients do not return, as FedBN keeps those
        of its normalisations: unknown, and simulated as they were sent, or as the model makes them.
    dropout
        Rate in [0, 1) of the model's dropout layers, or of one before the output layer where it
        has none. None: not declared; the model's own layers give it.
    norm_mode
        ``train``: batch normalisation used the batch's statistics; ``eval``: the running ones.
    defenses
        Name and public hyper-parameters of each defense, in the order they were applied.
    encryption
        ``none`` or the scheme under which the update was sent.
    """

    algorithm: Literal["fedsgd", "fedavg"] = "fedavg"
    model: Annotated[ModelName, WrapValidator(_keep_trust)] | None = None
    activation: Text = "sigmoid"
    input: Annotated[str, Field(min_length=1, max_length=64)] = "image"
    image_shape: tuple[Features, Side, Side] | None = None
    classes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    mean: Annotated[tuple[Moment, ...], Field(max_length=MOST_FEATURES)] | None = None
    std: Annotated[tuple[Scale, ...], Field(max_length=MOST_FEATURES)] | None = None
    table: TableSchema | None = None
    text: TextSchema | None = None
    signal: SignalSchema | None = None
    loss: Text = "cross_entropy"
    optimizer: Text = "sgd"
    lr: NotNegative | None = None
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    proximal_mu: NotNegative | None = None
    lr_factors: Factors = ()
    momenta: Momenta = ()
    max_grad_norm: Rate | None = None
    max_grad_value: Rate | None = None
    betas: Betas | None = None
    eps: Rate | None = None
    amsgrad: bool = False
    label_smoothing: Probability = 0.0
    class_weights: ClassWeights | None = None
    soft_targets: bool = False
    local_steps: Count | None = None
    batch_size: Count | None = None
    num_examples: Count | None = None
    augmentation: Augmentations = ()
    dropout: Probability | None = None
    norm_mode: Literal["train", "eval"] = "train"
    absent: Annotated[
        tuple[Annotated[str, Field(max_length=500)], ...], Field(max_length=10_000)
    ] = ()
    defenses: Defenses = ()
    encryption: Text = "none"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ClientDeclaration:
        """Check a mapping."""
        known = {f.name for f in fields(cls)}
        if strange := sorted(str(key) for key in content if key not in known):
            raise BractError(
                f"the client declaration has unknown keys {one_line(', '.join(strange), 200)}; "
                f"known are {', '.join(sorted(known))}",
                code="declaration-wrong",
            )
        try:
            return cls(**content)
        except (ValidationError, RecursionError) as error:
            raise BractError(
                f"the client declaration is wrong: {first_problem(error)}", code="declaration-wrong"
            ) from None

    @property
    def imports(self) -> bool:
        """Return whether ``model`` names code to import, rather than a model of the registry."""
        return self.model is not None and is_reference(self.model)

    def trusting(self, allowed: Collection[str]) -> ClientDeclaration:
        """Return a copy whose model may be imported, where the allow-list holds it."""
        if self.model is None or not self.imports or self.model not in allowed:
            return self
        return replace(self, model=TrustedReference(self.model))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    def updated(self, declared: Mapping[str, Any]) -> ClientDeclaration:
        """Return a copy in which what ``declared`` holds takes precedence."""
        return ClientDeclaration.from_dict({**self.to_dict(), **declared})


class CaptureRecord(BaseModel):
    """A frozen record of a capture, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClientStatement(CaptureRecord):
    """All that is taken from a client's own word about its computation."""

    num_examples: Count | None = None
    local_steps: Count | None = None
    batch_size: Count | None = None
    defenses: Defenses | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ClientStatement:
        """Take what is a client's to say, and leave everything else."""
        try:
            return cls(**{key: content[key] for key in cls.model_fields if key in content})
        except (ValidationError, RecursionError) as error:
            raise BractError(f"declared {first_problem(error)}", code="declaration-wrong") from None

    def lay_over(
        self,
        declaration: ClientDeclaration,
        said: Mapping[str, Any],
        changes_model: Callable[[str], bool] = lambda _: False,
    ) -> tuple[ClientDeclaration, list[str]]:
        """Return the operator's declaration with this client's word, and what contradicts it.

        Parameters
        ----------
        declaration
            What the operator of the server declares; his is everything that is no field here, and
            every defense that changes the model, which he built himself, where he declares one.
        said
            The client's whole declaration, for comparison.
        changes_model
            Returns by its name whether a defense changes the model's structure.
        """
        flags = []
        mine = declaration.to_dict()
        for key, value in said.items():
            if key in type(self).model_fields:
                continue
            if key not in mine:
                flags.append(f"declares {one_line(repr(key), 60)}, which was left out")
            elif not _same(value, mine[key]):
                theirs, own = one_line(value, 100), one_line(mine[key], 100)
                flags.append(f"declares {key} {theirs}, the server {own}; the server's was used")
        taken = self.model_dump(exclude_none=True)
        if declaration.batch_size and (self.batch_size or 0) > declaration.batch_size:
            flags.append(
                f"declares batch_size {self.batch_size}, the server at most "
                f"{declaration.batch_size}; the server's was used"
            )
            del taken["batch_size"]
        if self.defenses is not None and not _agree(declaration.defenses, self.defenses):
            both = (*self.defenses, *declaration.defenses)
            # Who declares no model knows of no defense in it either.
            knows = declaration.model is not None
            mine_hold = knows and any(changes_model(str(entry["name"])) for entry in both)
            flags.append(
                f"declares the defenses {_listed(self.defenses)}, the server "
                f"{_listed(declaration.defenses)}; the {'server' if mine_hold else 'client'}'s "
                "were used"
            )
            if mine_hold:
                del taken["defenses"]
        return replace(declaration, **taken), flags[:32]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _agree(server: Defenses, client: Defenses) -> bool:
    """Return whether the client's defenses are the server's, with defaults filled in."""
    return len(server) == len(client) and all(
        all(key in theirs and _same(theirs[key], value) for key, value in mine.items())
        for mine, theirs in zip(server, client, strict=True)
    )


def _listed(defenses: Defenses) -> str:
    return one_line(", ".join(str(entry["name"]) for entry in defenses) or "none", 100)
