"""The splits of images and networks: what chooses settings, what scores, what a release opens.

``choose`` chooses settings. ``score`` scores every development step, so that over many steps
choices adapt to it. ``release VERSION`` scores once a release: no image and no network of it is in
the others, and its name, which the result keeps, tells for which version it was opened. `OPENED`
keeps every opening from before its first row, so that a look that was not liked stays on record.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bract.errors import BractError

Kind = Literal["score", "choose", "release"]

FIRST_SEED: dict[Kind, int] = {"score": 0, "choose": 1000, "release": 7000}
"""Seed of each split's first network: no network both chooses a setting and scores it."""

OPENED = "opened-splits.jsonl"
"""File of the folder of results with one line for every opening of a release's split."""

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
        "the release's images are scored once a version, which the result must name",
        code="usage",
    )


def first_seed(split: str) -> int:
    """Return the seed of a split's first network."""
    return FIRST_SEED[kind_of(split)]


def open_release(split: str, experiment: str, command: str, folder: Path, *, version: str) -> None:
    """Record that a release's split is opened; do nothing for another split.

    The same command may run again, as one that was interrupted must, until its result is committed.

    Parameters
    ----------
    experiment
        The benchmark's name.
    command
        The command line that opens it.
    folder
        Where committed results lie.
    version
        Of the code that is measured.

    Raises
    ------
    BractError
        If the split names another version than the code's, or the experiment was scored on it
        already: by a committed result, or by another command of the record.
    """
    if kind_of(split) != "release":
        return
    if split != f"release {version}":
        raise BractError(
            f"split {split!r}: the code is version {version}; expected 'release {version}', since "
            "a split is opened once a version and not once a name",
            code="usage",
        )
    for path in sorted(folder.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        # The command is a part of every result, and names the split.
        if f'"experiment": "{experiment}"' in text and split in text:
            raise _reopened(split, experiment, path)
    record = folder / OPENED
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for line in map(json.loads, lines):
        if (line["split"], line["experiment"]) == (split, experiment):
            if line["command"] != command:
                raise _reopened(split, experiment, record)
            return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    opened = {"split": split, "experiment": experiment, "command": command, "opened": now}
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(opened) + "\n")


def _reopened(split: str, experiment: str, path: Path) -> BractError:
    return BractError(
        f"{path}: {experiment} was scored on the split {split!r} already; it is opened once a "
        "version. Use --split score, or raise the version",
        code="file-taken",
    )
