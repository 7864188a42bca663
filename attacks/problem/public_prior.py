"""Knowledge of public images: its contract, and how a file of it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from bract.errors import BractError, reworded
from bract.installed.plugins import blaming, elsewhere
from bract.registry import Registry, named


class PublicPrior(ABC):
    """Knowledge of public images that attacks of the surrogate tier search, as a file holds it.

    A package registers a class of its own as an entry point of the group ``bract.priors``, under
    its `name`; bract's own is in the package bract-priors.
    """

    name: ClassVar[str]
    """Registered name."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Kind of the prior, which an attack names as its `Attacker.generator`."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """Labels that `sample` distinguishes; 0 for none."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Name of the public images, for a report."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Words for it in a report, such as ``a generator trained on ...``."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Digest of everything that results depend on."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return its properties and its training data, JSON-ready, for the settings of a result."""

    @abstractmethod
    def sample(self, labels: Sequence[int], *, seed: int) -> Tensor:
        """Return one image a label ``(N, C, H, W)``, float32 in [0, 1], drawn under a seed."""

    @abstractmethod
    def trained_on(self, images: Tensor) -> Tensor:
        """Return which images ``(N, C, H, W)`` are copies of training images, bool ``(N,)``."""

    @classmethod
    @abstractmethod
    def load(cls, path: Path) -> Self:
        """Read an untrusted file.

        Raises
        ------
        BractError
            If it is no such file, or is damaged.
        """


PRIORS: Registry[type[PublicPrior]] = Registry(
    "prior", group="bract.priors", check=partial(named, PublicPrior)
)


def _checked(kind: type[PublicPrior], path: Path) -> PublicPrior:
    """Read a file by a class, and what it says of it once, so that a faulty class is named here."""
    found = kind.load(path)
    if not isinstance(found, PublicPrior):
        raise TypeError(f"load returned {type(found).__name__}, expected a PublicPrior")
    _ = (found.kind, found.classes, found.source, found.text, found.digest, found.record())
    return found


def load_prior(path: Path) -> PublicPrior:
    """Read an untrusted file of a prior, by the first installed class that can.

    Raises
    ------
    BractError
        If no package that reads priors is installed, with the line that installs one; or if none
        can read the file, with the reason of the first, and the line that installs bract's own
        package where it is missing.
    """
    reasons: list[BractError] = []
    for name in PRIORS:
        try:
            with blaming(PRIORS[name]):
                return _checked(PRIORS[name], path)
        except BractError as error:
            reasons.append(error)
    if not reasons:
        raise PRIORS.missing("generator")
    # Of a file that bract's own package would read, another package's reason alone misleads.
    own = [PRIORS.missing(name) for name in elsewhere("bract.priors") if name not in PRIORS]
    raise reworded(reasons[0], "; ".join(map(str, [*reasons[:1], *own])))
