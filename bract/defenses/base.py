"""A defense: its public specification, the client's contract, and the registry."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import Tensor, nn

from bract.crypto.randomness import SecretStream
from bract.errors import BractError
from bract.registry import Registry, named
from bract.updates.update import Tensors


class DefenseError(BractError):
    """A defense could not protect an update; nothing may leave the client."""

    code = "defense-failed"


class Stage(IntEnum):
    """Position of a defense in a chain; a chain goes through the stages in this order."""

    MODEL = 0
    REPRESENTATION = 1
    TRANSFORM = 2
    SPARSIFY = 3
    NOISE = 4


Keeps = Literal["nothing", "state", "model"]
"""A client's private state from round to round: nothing, tensors, or part of its model."""


@dataclass(frozen=True)
class ProtectContext:
    """A client's context while it protects one update. None of it is ever sent.

    Attributes
    ----------
    round
        Server round, from 1.
    seed
        The client's private seed, of any length, or None to draw from the operating system. A
        seed that the server knows (the federation's) or can guess lets it remove noise and
        recompute keys.
    model
        The model after local training, as the client trained it.
    images, labels
        The first batch of this round: model inputs ``(B, C, H, W)`` and int64 ``(B,)``.
    """

    round: int = 1
    seed: int | None = None
    model: nn.Module | None = None
    images: Tensor | None = None
    labels: Tensor | None = None

    def stream(self, purpose: str) -> SecretStream:
        """Return the secret random numbers of this round for one purpose ("noise").

        Everything secret that a defense draws comes from here, never from `torch.Generator`, whose
        seeds a server can try one by one. Without a private seed every call takes 256 bits from
        the operating system; with one, the same round and purpose give the same numbers.
        """
        if self.seed is None:
            return SecretStream.fresh()
        return SecretStream.derived(self.seed, self.round, purpose)


class DefenseSpec(BaseModel):
    """Public specification of a defense, which server, attacker and report read as the client does.

    Fields are the hyper-parameters with their ranges: the server and the attacker know them.

    Attributes
    ----------
    name
        What configurations and declarations call the defense.
    title
        Its name in reports; ``{field}`` represents the value of a hyper-parameter.
    summary
        What a client sends, in one line.
    stage
        Its position in a chain.
    keeps
        What each client keeps to itself from round to round. With ``model`` the server's copy of
        the model is not usable as it is: each client has its own.
    inputs
        Kinds of input (`bract.inputs`) whose updates it can protect; empty for all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[Stage]
    keeps: ClassVar[Keeps] = "nothing"
    inputs: ClassVar[tuple[str, ...]] = ()

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Change the structure of the model, alike at the server and at every client."""
        return model

    @classmethod
    def changes_model(cls) -> bool:
        """Return whether the defense changes the structure of the model."""
        return cls.prepare_model is not DefenseSpec.prepare_model

    @property
    def server_lr(self) -> float:
        """Return the ``strategy.server_lr`` that goes with this defense."""
        return 1.0

    def public(self) -> dict[str, Any]:
        """Return the name and the public hyper-parameters, as the protocol declares them."""
        return {"name": self.name, **self.model_dump(mode="json")}

    @classmethod
    def title_with(cls, settings: Mapping[str, Any]) -> str:
        """Return the title of the defense under some settings: ``Gaussian noise``."""
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        text = cls.title.format_map(defaults | dict(settings))
        return text[:1].upper() + text[1:]

    @classmethod
    def in_title(cls) -> frozenset[str]:
        """Return the hyper-parameters that the title contains."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(cls.title) if name)


class Defense(DefenseSpec, ABC):
    """A defense: its specification, and what a client does to protect an update with it.

    A subclass states what `DefenseSpec` lists and its hyper-parameters with their ranges, and
    implements `protect`. Private state is a dictionary of tensors.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `ProtectContext` without which the defense cannot run."""

    _report: dict[str, float] = PrivateAttr(default_factory=dict)

    def check_installed(self) -> None:
        """Refuse to run where a package is missing that these settings need at a client."""

    def attach(self, model: nn.Module, state: Tensors, context: ProtectContext) -> None:
        """Give a prepared model this client's secrets before it trains or evaluates."""

    @abstractmethod
    def protect(self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext) -> Any:
        """Return the tensors to send instead of ``update``.

        Parameters
        ----------
        update
            Trainable tensors by name, in the sign convention of `bract.updates.update`. Not to be
            changed in place.
        state
            This defense's tensors from earlier rounds; empty at first. Entries are replaced,
            never changed in place, so that a failure leaves the earlier state whole.

        Returns
        -------
        dict of str to Tensor
            The same names in the same order, with the same shapes and dtypes, all finite.
        """

    def at_least(self, other: Defense) -> bool:
        """Return whether these settings hide as much as others of the same defense, or more.

        False where that cannot be told: a subclass says by what its settings compare.
        """
        return self.public() == other.public()

    def note(self, **figures: float) -> None:
        """Replace the figures of `report`."""
        self._report = figures

    @property
    def report(self) -> dict[str, float]:
        """Return figures about the last `protect`, for the client's own log.

        They describe the private update: do not send them where the defense must hold against
        the server.
        """
        return dict(self._report)


def _plugin_problem(name: str, entry: object) -> str | None:
    problem = named(Defense, name, entry)
    if problem is not None:
        return problem
    lacking = [key for key in ("title", "summary", "stage") if not hasattr(entry, key)]
    lacking += sorted(getattr(entry, "__abstractmethods__", ()))
    return f"the defense has no {', '.join(lacking)}; state it" if lacking else None


DEFENSES: Registry[type[Defense]] = Registry(
    "defense", group="bract.defenses", check=_plugin_problem
)


def cosine_and_ratio(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the cosine between two vectors ``(D,)`` and ``|after| / |before|``.

    Zero vectors have cosine 1 with each other and 0 with anything else.
    """
    norms = float(before.norm()), float(after.norm())
    if norms[0] == 0.0:
        return (1.0, 1.0) if norms[1] == 0.0 else (0.0, float("inf"))
    if norms[1] == 0.0:
        return 0.0, 0.0
    return float(before.dot(after)) / (norms[0] * norms[1]), norms[1] / norms[0]
