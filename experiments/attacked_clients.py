"""The clients of `experiments.harness.clients`, their defenses by the name of a row."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from experiments.harness import clients
from experiments.harness.clients import NETWORKS, Upload
from experiments.harness.images import ImageSet
from experiments.harness.operating_points import POINTS

__all__ = [
    "DEFENSES",
    "LOCKS",
    "NETWORKS",
    "Situation",
    "Upload",
    "images_of",
    "trained_accuracy",
    "uploads",
]

DEFENSES: Mapping[str, list[dict[str, Any]]] = POINTS
"""Configurations by name; ``fedkl`` is the paper's formula, ``fedkl, ReLU`` the authors' code."""

LOCKS = ("fedkl", "fedkl, ReLU")


@dataclass(frozen=True)
class Situation:
    """What clients do in one row: a `clients.Situation` with a name of `DEFENSES`."""

    data: str
    model: str
    defense: str = "none"
    round: int = 1
    batch: int = 1
    steps: int = 0
    step_images: int = 0
    trained: bool = False
    uploads: int = 16

    @property
    def clients(self) -> clients.Situation:
        """What these clients do."""
        given = asdict(self)
        # Rows without a model are baselines; they name no defense.
        chain = DEFENSES.get(given.pop("defense"), [])
        return clients.Situation(**given, defenses=tuple(chain))


def images_of(situation: Situation, split: str) -> ImageSet:
    """Return the images of a row: those of all uploads, one after the other."""
    return clients.images_of(situation.clients, split)


def uploads(situation: Situation, *, split: str, secret: int) -> list[Upload]:
    """Run every client up to the round that is attacked; see `clients.uploads`."""
    return clients.uploads(situation.clients, split=split, secret=secret)


def trained_accuracy(situation: Situation, split: str) -> float | None:
    """Return the mean test accuracy of a row's trained networks; None of fresh ones."""
    return clients.trained_accuracy(situation.clients, split)
