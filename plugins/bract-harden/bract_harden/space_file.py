"""Define the YAML file of a space, and read it::

    space:
      training.batch_size: [1, 8, 64]               # a choice
      training.lr: {low: 0.02, high: 0.2, log: true}  # a range
    defenses:                                       # one of these chains; a field may be a range
      - []
      - [{name: noise, std: {low: 1.0e-4, high: 0.1, log: true}}]
      - [adadefense, {name: pruning, ratio: {low: 0.5, high: 0.99}}]
    constraints: {accuracy_loss: 0.02, leak: none}
    search: {trials: 40, seeds: 3}

What is left out has the default.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bract.disk import read_named
from bract.errors import BractError, one_line, shown
from bract.parse import parse_yaml
from bract.registry import unknown


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(_Section):
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}; exchange them")
        if self.log and self.low <= 0.0:
            raise ValueError(f"log needs a low above 0, found {self.low:g}")
        return self

    @property
    def middle(self) -> float:
        """The arithmetic mean of the ends, of a ``log`` range the geometric one."""
        return self.at(0.5)

    def at(self, share: float) -> float:
        """Return the value at a share of the range, cut to [0, 1]; `share` undoes it."""
        share = min(1.0, max(0.0, share))
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if self.whole else self.rounded(value)

    def share(self, value: float) -> float:
        """Return where in the range a value is, in [0, 1]."""
        if self.low == self.high:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def rounded(self, value: float) -> float:
        """Return a value to three significant digits, within the range."""
        return min(max(float(f"{value:.3g}"), self.low), self.high)

    @property
    def ends(self) -> tuple[float, ...]:
        """Values that are tried for feasibility."""
        return tuple(dict.fromkeys(int(v) if self.whole else v for v in (self.low, self.high)))


class Constraints(_Section):
    """What a candidate must keep to be recommended.

    Attributes
    ----------
    accuracy
        Least test accuracy.
    accuracy_loss
        Most that it may lose of the accuracy of the configuration as it is, in [0, 1].
    leak
        ``none``: no question's rule finds a leak; None bounds nothing.
    epsilon
        Most that the account of noise may spend over all rounds.
    seconds, bytes
        Most CPU seconds of a round, and bytes of a client's upload.
    """

    accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    accuracy_loss: Annotated[float, Field(ge=0.0, le=1.0)] | None = 0.02
    leak: Literal["none"] | None = "none"
    epsilon: Annotated[float, Field(gt=0.0)] | None = None
    seconds: Annotated[float, Field(gt=0.0)] | None = None
    bytes: Annotated[int, Field(ge=1)] | None = None


class Search(_Section):
    """How far the search goes.

    Attributes
    ----------
    trials
        Candidates that are trained and attacked cheaply.
    seeds
        Federations of each point of the frontier, each with its own seed and its own images.
    points
        Most points that get the full attack; those that leak least come first.
    frontier
        Points that the frontier is to have. Where it has fewer after ``trials`` candidates, up to
        as many again are tried near it.
    workers
        Processes that train and attack federations at once; None takes the number of cores.
    together
        Candidates that are asked for at once, so the most that several workers share. It changes
        what is searched, ``workers`` does not.
    floor
        A candidate with less than this share of the accuracy of the configuration as it is is
        trained and not attacked.
    cheap, middle
        Keys of the audit section in the first two stages, which attack the first round by the first
        of the configuration's attacks unless they name others.
    full
        Keys of the audit section that the full attack has in place of the configuration's own.
    """

    trials: Annotated[int, Field(ge=1)] = 40
    seeds: Annotated[int, Field(ge=1, le=50)] = 3
    points: Annotated[int, Field(ge=1)] = 12
    frontier: Annotated[int, Field(ge=0)] = 8
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    together: Annotated[int, Field(ge=1, le=256)] = 8
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    cheap: dict[str, Any] = {"iterations": 80}
    middle: dict[str, Any] = {"iterations": 250}
    full: dict[str, Any] = {}


class SpaceFile(_Section):
    """The whole YAML file."""

    space: dict[str, list[Any] | Range] | None = None
    defenses: list[list[str | dict[str, Any]]] | None = None
    constraints: Constraints = Constraints()
    search: Search = Search()


def read_space(path: Path) -> SpaceFile:
    """Read a space's YAML file."""
    try:
        content = parse_yaml(read_named(path).decode("utf-8"))
    except FileNotFoundError:
        raise BractError(f"{path}: no such file", code="file-missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read as text: {one_line(error, 200)}", code="file-unreadable"
        ) from error
    except BractError as error:
        raise BractError(f"{path}: {error}", code=error.code) from None
    try:
        return SpaceFile.model_validate(content or {})
    except ValidationError as error:
        problems = error.errors()
        first = next((p for p in problems if p["type"] != "list_type"), problems[0])
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        if first["type"] == "extra_forbidden":
            sections: dict[str, type[BaseModel]] = {"constraints": Constraints, "search": Search}
            fields = sections.get(str(first["loc"][0]), SpaceFile)
            raise BractError(
                f"{path}: {unknown('key', str(first['loc'][-1]), fields.model_fields)}",
                code="config-key",
            ) from error
        found = shown(first["input"])
        raise BractError(
            f"{path}: {where}: found {found}; {first['msg']}", code="config-value"
        ) from error
