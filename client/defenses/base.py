"""What a defense is: the contract, its context, its place in a chain, and the registry."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import Tensor, nn

from bract.errors import BractError
from bract.registry import Registry
from bract.update import Tensors


class DefenseError(BractError):
    """A defense could not protect an update; nothing may leave the client."""


class Stage(IntEnum):
    """Where a defense stands in a chain; a chain goes through the stages in this order."""

    MODEL = 0
    REPRESENTATION = 1
    TRANSFORM = 2
    SPARSIFY = 3
    NOISE = 4


@dataclass(frozen=True)
class ProtectContext:
    """What a client knows while it protects one update. None of it is ever sent.

    Attributes
    ----------
    round
        Server round, from 1.
    seed
        The client's private seed for this round, or None to draw from the operating system. A
        seed that the server knows (the federation's) lets it remove noise and recompute keys.
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

    def generator(self, purpose: str) -> torch.Generator:
        """Return a CPU generator of this round for one purpose ("noise").

        Without a private seed every call draws 64 bits from the operating system.
        """
        generator = torch.Generator()
        if self.seed is None:
            return generator.manual_seed(secrets.randbits(63))
        digest = hashlib.sha256(f"{self.seed}/{self.round}/{purpose}".encode()).digest()
        return generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Defense(BaseModel, ABC):
    """A client-side defense: public hyper-parameters as fields, private state in a dictionary.

    A subclass states its name, its stage and its hyper-parameters with their ranges, and
    implements `protect`. Every field is public: the server and the attacker know it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    stage: ClassVar[Stage]
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `ProtectContext` without which the defense cannot run."""

    _report: dict[str, float] = PrivateAttr(default_factory=dict)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Change the structure of the model, alike at the server and at every client."""
        return model

    def attach(self, model: nn.Module, state: Tensors, context: ProtectContext) -> None:
        """Give a prepared model this client's secrets before it trains or evaluates."""

    @abstractmethod
    def protect(self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext) -> Any:
        """Return what is sent instead of ``update``.

        Parameters
        ----------
        update
            Trainable tensors by name, in the sign convention of `bract.update`. Not to be
            changed in place.
        state
            This defense's tensors from earlier rounds; empty at first. Entries are replaced,
            never changed in place, so that a failure leaves the earlier state whole.

        Returns
        -------
        dict of str to Tensor
            The same names in the same order, with the same shapes and dtypes, all finite.
        """

    def public(self) -> dict[str, Any]:
        """Return the name and the public hyper-parameters, as the protocol declares them."""
        return {"name": self.name, **self.model_dump(mode="json")}

    @property
    def report(self) -> dict[str, float]:
        """Return figures about the last `protect`, for the client's own log.

        They describe the private update: do not send them where the defense must hold against
        the server.
        """
        return dict(self._report)

    @property
    def server_lr(self) -> float:
        """Return the ``strategy.server_lr`` that goes with this defense."""
        return 1.0


DEFENSES: Registry[type[Defense]] = Registry("defense")


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
