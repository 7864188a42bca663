"""Base of every kind of experiment: check settings, name missing data, measure by units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from bract.errors import BractError, one_line
from bract.installed.versions import RESULT_CODE
from experiments.harness.data_folders import FOLDER, Need, missing
from experiments.harness.result import own
from experiments.papers.results import Sample


class Settings(BaseModel):
    """The settings of one row; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Context:
    """Where a row runs.

    Attributes
    ----------
    device
        Of torch.
    folder
        Where data sets lie that are not offline.
    """

    device: str = "cpu"
    folder: Path = FOLDER


@dataclass(frozen=True)
class Measured:
    """What a unit gave; see `experiments.papers.results.Unit`."""

    samples: list[Sample]
    refused: list[str] = field(default_factory=list)
    pictures: str | None = None
    secret: str | None = None


S = TypeVar("S", bound=Settings)


class Runner(ABC, Generic[S]):
    """Runs the rows of one kind of experiment."""

    settings: ClassVar[type[Settings]]
    code: ClassVar[tuple[str, ...]]
    """Modules and packages that results follow from, in addition to `CODE`."""

    def parse(self, content: dict[str, Any], *, where: str) -> S:
        """Check a row's settings.

        Raises
        ------
        BractError
            Naming the row and the first setting that does not fit.
        """
        try:
            return self.settings.model_validate(content)  # type: ignore[return-value]
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise BractError(
                f"{where}: {key}: {one_line(first['msg'], 200)}", code="config-value"
            ) from error

    @abstractmethod
    def count(self, settings: S) -> int:
        """Return the number of units of a row."""

    @abstractmethod
    def run(self, settings: S, unit: int, context: Context) -> Measured:
        """Measure one unit."""

    def data(self, settings: S) -> str | None:
        """Return the name of the data set that a row uses, if it uses one."""
        name: str | None = getattr(settings, "data", None)
        return name

    def missing(self, settings: S, context: Context) -> Need | None:
        """Return the data that a row lacks; None if it can run."""
        name = self.data(settings)
        return None if name is None else missing(name, context.folder)


CODE = (
    *(*RESULT_CODE, "bract.audit.questions"),
    *own("harness.data_folders", "harness.uploads", "papers.runners.base"),
)
"""What every result follows from, by the names of modules and packages."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with this many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
