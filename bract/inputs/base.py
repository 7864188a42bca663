"""The contract of an input, and the registry of inputs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.config import DataConfig
from bract.installed.plugins import PluginError, blaming
from bract.registry import Registry, named
from bract.schema import ClientDeclaration
from bract.schema.inputs import InputOutline

_log = logging.getLogger(__name__)

FILLING = -1
"""In the place of padding in token ids that a client kept: its own padding id is not known yet."""


@dataclass(frozen=True)
class Truth:
    """Originals at a consenting client.

    Attributes
    ----------
    images
        Examples ``(N, ...)`` of the input's shape, dtype and range; of images float32
        ``(N, C, H, W)`` in [0, 1].
    labels
        int64 ``(N,)``; float32 where the target is a number; of tokens ``(N, T)``, below 0 where
        a token has none.
    targets
        Probabilities of all classes that entered the loss, float32 ``(N, classes)``; None where
        labels did.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor | None = None

    @property
    def entered(self) -> Tensor:
        """Return what entered the loss: the targets, or the labels."""
        return self.labels if self.targets is None else self.targets


class References(Protocol):
    """Examples that are in no upload under attack: baselines, and candidates for retrieval."""

    @property
    def candidates(self) -> Tensor:
        """Examples among which an original is searched."""

    def of_class(self, label: int) -> Tensor:
        """Return examples with this label; ``(0, ...)`` where there are none."""

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean example of each wanted label, ``(N, ...)``."""

    def baselines(self, labels: Tensor, count: int, *, seed: int) -> dict[str, Tensor]:
        """Return ``count`` examples by the baseline's name, made without any upload.

        Parameters
        ----------
        labels
            int64 ``(N,)``, the labels of the originals.
        """

    def without(self, truth: Truth) -> References | None:
        """Return the references that are not among these originals; None if none are left."""


class Input(InputOutline, ABC):
    """One kind of input; it has the attributes of `InputOutline` too, which pages read.

    Attributes
    ----------
    is_described
        Whether ``bract describe`` infers it from captures; others are declared with the hook.
    third_party
        Whether apps of others are audited with it, and not bract's own federations alone.
    suffix
        Ending of the files that `save` writes.
    neighbours
        Whether neighbouring values of an example are alike, as the bound on what an upload can
        tell assumes (`bract.attacks.problem.identifiability`).
    """

    is_described: ClassVar[bool] = False
    third_party: ClassVar[bool] = True
    neighbours: ClassVar[bool] = False
    suffix: ClassVar[str] = ""

    @classmethod
    def declared(cls, declaration: ClientDeclaration) -> Self:
        """Return the input of one client; one that depends on the declaration overrides this."""
        del declaration
        return cls()

    def unreadable(self, declaration: ClientDeclaration) -> str | None:
        """Return why a declaration is none of this input's, by name; None where it is."""
        del declaration
        return None

    @abstractmethod
    def examples(self, batch: object) -> tuple[Tensor, Tensor] | None:
        """Return model inputs and labels of a loader's batch; None if they are another input."""

    def examples_like(self, batch: object, label: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `examples` of a batch after one of which an example had this label."""
        del label
        return self.examples(batch)

    @abstractmethod
    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Check the tensors that a client kept, and return them as truth.

        Parameters
        ----------
        kept
            ``labels``, with ``inputs`` as the model saw them or the examples by their own name.
        """

    def features(self, examples: Tensor) -> Tensor:
        """Return what a classifier that sees no model is given of N examples, ``(N, ...)``."""
        return examples

    def attributes(self, examples: Tensor) -> dict[str, Tensor]:
        """Return the group of each of N examples by attribute, int64 ``(N,)`` from 0.

        An audit asks what share each group has in a client's data.
        """
        del examples
        return {}

    @abstractmethod
    def fitted(self, data: DataConfig, declaration: ClientDeclaration) -> DataConfig:
        """Return the data section whose examples have the declared shape."""

    @abstractmethod
    def references(self, data: DataConfig, seed: int) -> References:
        """Return references from the test split of a data set."""

    @abstractmethod
    def kept_references(self, truths: Iterable[Truth], seed: int) -> References | None:
        """Return references from the examples that clients kept; None if they kept none."""

    @classmethod
    @abstractmethod
    def check_saved(cls, name: str, content: bytes) -> None:
        """Refuse a file of another process that is not what `save` writes, by a `BractError`."""

    @abstractmethod
    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write one example for the page, mode 0600; return the file's name.

        Parameters
        ----------
        beside
            The JSON file of the result; its stem begins the name.
        role
            ``reconstruction`` or ``original``.
        """


INPUTS: Registry[type[Input]] = Registry("input", group="bract.inputs", check=partial(named, Input))


def what_is_audited() -> str:
    """Name what an audit handles, in one clause; the same one wherever it is said."""
    named = sorted(name for name in INPUTS if INPUTS[name].third_party)
    return f"an audit handles PyTorch models of these inputs: {', '.join(named)}"


def input_of(declaration: ClientDeclaration) -> Input:
    """Return the input that a client declares; a `BractError` names an unknown one."""
    return INPUTS[declaration.input].declared(declaration)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return examples ``(N, ...)`` of parts in one; shorter token ids end in `FILLING`."""
    if any(part.dim() != 2 or part.dtype != torch.int64 for part in parts):
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=FILLING) for part in parts])


def content_bytes(example: Tensor) -> bytes:
    """Return what tells examples apart: of token ids without the filling behind them."""
    if example.dim() == 1 and example.dtype == torch.int64:
        there = (example != FILLING).nonzero()
        example = example[: int(there[-1]) + 1 if len(there) else 0]
    return example.numpy().tobytes()


def kept_examples(batch: object, label: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Return the model inputs and labels of a batch, by the first input that recognises it.

    ``label``, of an example of an earlier batch, decides of which kind those of this one are.
    An input of another package that fails is passed over, with one line in the log.
    """
    for name in INPUTS:
        kind = INPUTS[name]
        if not kind.third_party:
            continue
        try:
            with blaming(kind):
                one = kind()
                found = one.examples(batch) if label is None else one.examples_like(batch, label)
        except PluginError as error:
            _log.warning("%s", error)
            continue
        if found is not None:
            return found
    return None
