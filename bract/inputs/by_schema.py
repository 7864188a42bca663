"""Inputs whose examples a client declares by a schema: tables, texts, signals."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.signal import SignalSchema
from bract.config.table import TableSchema
from bract.config.text import TextSchema
from bract.data import Source
from bract.data.views import data_spec
from bract.disk.files import write_text
from bract.errors import BractError
from bract.inputs.base import Input, References, Truth
from bract.inputs.image import KeptReference, Reference, each_once
from bract.schema import ClientDeclaration

ROUNDING = 1e-3
"""By how much values may exceed [0, 1] for the rounding of the declared statistics."""

Schema = TypeVar("Schema", TableSchema, TextSchema, SignalSchema)


@dataclass(frozen=True)
class InputBySchema(Input, Generic[Schema]):
    """An input with a schema, which a declaration and a data section hold under the input's name.

    Parameters
    ----------
    schema
        As the client declares it; None reads no truth and shows no example.

    Attributes
    ----------
    keys
        Keys of the schema that every description of an app has, in words.
    """

    is_described = True
    keys: ClassVar[str] = ""

    schema: Schema | None = None

    @classmethod
    def declared(cls, declaration: ClientDeclaration) -> Self:
        """Return the input with the declared schema."""
        return cls(getattr(declaration, cls.name))

    def unreadable(self, declaration: ClientDeclaration) -> str | None:
        """Return why no example can be read: no schema, or one of another shape than declared."""
        if self.schema is None:
            return self._no_schema()
        shape = declaration.image_shape
        if shape is not None and shape != self.schema.shape:
            return (
                f"{self.extent(self.schema)}, the declared input {list(shape)}; declare what the "
                "clients train on"
            )
        return None

    @staticmethod
    @abstractmethod
    def extent(schema: Schema) -> str:
        """Return in words what shape of examples a schema gives."""

    def fitted(self, data: DataConfig, declaration: ClientDeclaration) -> DataConfig:
        """Return the section with the declared schema."""
        declared = getattr(declaration, self.name)
        return data.model_copy(update={self.name: declared, "input": self.name})

    def kept_references(self, truths: Iterable[Truth], seed: int) -> References | None:
        """Return the examples that clients kept, each once."""
        kept = each_once(truths)
        return None if kept is None else self.references_of(*kept, seed, self.of_schema())

    @staticmethod
    @abstractmethod
    def references_of(examples: Tensor, labels: Tensor, seed: int, schema: Schema) -> References:
        """Return references of examples that clients kept."""

    def of_schema(self) -> Schema:
        """Return the declared schema; a `BractError` where there is none."""
        if self.schema is None:
            raise BractError(self._no_schema(), code="declaration-lacks")
        return self.schema

    def _no_schema(self) -> str:
        keys = f": {self.keys}" if self.keys else ""
        return (
            f"the client declares the input {self.name} and no schema; declare it "
            f"(data.{self.name}, or input.{self.name} of bract.yaml{keys}): without it no "
            f"{self.noun} can be read"
        )

    def _write(self, text: str, beside: Path, index: int, role: str) -> str:
        """Write an example's file beside its result, and return the name."""
        path = beside.with_name(f"{beside.stem}--{index:02d}-{role}{self.suffix}")
        return write_text(path, text).name


class ReferenceBySchema(Reference, Generic[Schema]):
    """Examples of the test split, whose schema is that of their data section."""

    kind: ClassVar[str]
    """Name of the input."""

    @property
    @abstractmethod
    def one_class(self) -> bool:
        """Return whether all examples are of class 0, because labels are no classes."""

    def of_class(self, label: int) -> Tensor:
        """Return examples with this label, ``(M, ...)``."""
        return super().of_class(0 if self.one_class else label)

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean example of each label, ``(N, ...)``."""
        return super().class_mean(torch.zeros(len(wanted)) if self.one_class else wanted)

    @cached_property
    def _source(self) -> Source:
        found = super()._source
        if not self.one_class:
            return found
        return replace(found, labels=torch.zeros(len(found.labels), dtype=torch.int64))

    @cached_property
    def schema(self) -> Schema:
        """The schema by which examples are encoded."""
        found: Schema | None = getattr(data_spec(self.data), self.kind)
        assert found is not None
        return found


class KeptBySchema(ReferenceBySchema[Schema], KeptReference):
    """Examples that clients kept, without those of one client's update."""

    def __init__(self, examples: Tensor, labels: Tensor, seed: int, schema: Schema) -> None:
        super().__init__(examples, labels.long(), seed)
        self.schema = schema

    def _holding(self, images: Tensor, labels: Tensor) -> Self:
        return type(self)(images, labels, self.seed, self.schema)


def moments(
    declaration: ClientDeclaration, schema: TableSchema | SignalSchema
) -> tuple[Tensor, Tensor]:
    """Return mean and std of each feature or channel: the declared ones, else the schema's."""
    mean, std = schema.feature_moments()
    return torch.tensor(declaration.mean or mean), torch.tensor(declaration.std or std)
