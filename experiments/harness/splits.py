"""The splits of images and networks: what chooses settings, what scores, what a release opens.

``choose`` chooses settings. ``score`` scores every development step, so that over many steps
choices adapt to it. ``release VERSION`` scores once a release: no image and no network of it is in
the others, and its name, which the result keeps, tells for which version it was opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from bract.errors import BractError

Kind = Literal["score", "choose", "release"]

FIRST_SEED: dict[Kind, int] = {"score": 0, "choose": 1000, "release": 7000}
"""Seed of each split's first network: no network both chooses a setting and scores it."""

_RELEASE = re.compile(r"release (\d+\.\d+\.\d+)")


def kind_of(split: str) -> Kind:
    """Return which split a name means.

    Raises
    ------
    BractError
        If there is no such split, or the release's does not name the version that opens it.
    """
    named: dict[str, Kind] = {"score": "score", "choose": "choose"}
    if split in named:
        return named[split]
    if _RELEASE.fullmatch(split):
        return "release"
    raise BractError(
        f"split {split!r}: expected score, choose, or 'release VERSION' such as 'release 0.2.0': "
        "the release's images are scored once a version, which the result must name"
    )


def first_seed(split: str) -> int:
    """Return the seed of a split's first network."""
    return FIRST_SEED[kind_of(split)]


def refuse_reopened(split: str, experiment: str, folder: Path) -> None:
    """Refuse to score a release's split a second time for the same version.

    Parameters
    ----------
    experiment
        The benchmark's name.
    folder
        Where committed results lie.

    Raises
    ------
    BractError
        If a committed result of the experiment was scored on it.
    """
    if kind_of(split) != "release":
        return
    for path in sorted(folder.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        # The command is a part of every result, and names the split.
        if f'"experiment": "{experiment}"' in text and split in text:
            raise BractError(
                f"{path}: {experiment} was scored on the split {split!r} already; it is opened "
                "once a version. Use --split score, or commit a version's first result only"
            )
