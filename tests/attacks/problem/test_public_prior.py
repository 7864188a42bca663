"""Priors of other packages: registered by an entry point, and read by the first that can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from refusals import refused
from torch import Tensor

from bract.attacks import PublicPrior, load_prior
from bract.attacks.problem import public_prior
from bract.errors import BractError
from bract.registry import Registry


class Mean(PublicPrior):
    """One image, as text of its grey value."""

    name: ClassVar[str] = "mean"
    kind, classes, source, text, digest = "mean", 0, "greys", "one grey", "0"

    def __init__(self, value: float) -> None:
        self.value = value

    def record(self) -> dict[str, Any]:
        return {"value": self.value}

    def sample(self, labels: Sequence[int], *, seed: int) -> Tensor:
        return torch.full((len(labels), 1, 8, 8), self.value)

    def trained_on(self, images: Tensor) -> Tensor:
        return torch.zeros(len(images), dtype=torch.bool)

    @classmethod
    def load(cls, path: Path) -> Self:
        text = path.read_text()
        if not text.startswith("mean "):
            raise BractError(f"{path}: no {cls.name}", code="file-damaged")
        return cls(float(text.removeprefix("mean ")))


class Other(Mean):
    """A kind that reads nothing, and is asked first."""

    name: ClassVar[str] = "another"

    @classmethod
    def load(cls, path: Path) -> Self:
        raise BractError(f"{path}: no {cls.name}", code="file-damaged")


class Silent(Mean):
    """A kind whose class is faulty."""

    name: ClassVar[str] = "silent"

    @classmethod
    def load(cls, path: Path) -> Any:
        return None


class Broken(Mean):
    """A kind whose record raises."""

    name: ClassVar[str] = "broken"

    def record(self) -> dict[str, Any]:
        raise RuntimeError("no record")


@pytest.fixture
def priors(monkeypatch: pytest.MonkeyPatch) -> Registry[type[PublicPrior]]:
    made: Registry[type[PublicPrior]] = Registry("prior")
    monkeypatch.setattr(public_prior, "PRIORS", made)
    made.register("mean")(Mean)
    made.register("another")(Other)
    return made


def test_the_first_class_that_can_reads_a_file(
    priors: Registry[type[PublicPrior]], tmp_path: Path
) -> None:
    file = tmp_path / "grey"
    file.write_text("mean 0.5")
    assert load_prior(file).record() == {"value": 0.5}
    file.write_text("text")
    with refused("file-damaged", file, "another"):
        load_prior(file)


@pytest.mark.parametrize(("kind", "error"), [(Silent, TypeError), (Broken, RuntimeError)])
def test_a_faulty_class_fails_where_it_is_loaded_and_blamed(
    kind: type[PublicPrior],
    error: type[Exception],
    priors: Registry[type[PublicPrior]],
    tmp_path: Path,
) -> None:
    priors.register("a-faulty-one")(kind)
    file = tmp_path / "grey"
    file.write_text("mean 0.5")
    with pytest.raises(error):
        load_prior(file)
