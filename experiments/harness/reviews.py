"""Sentences of film reviews: made from templates, or those of SST-2 where its file is there."""

from __future__ import annotations

import random
from pathlib import Path

from bract.errors import BractError
from experiments.harness.data_folders import FOLDER, Need

REVIEWS, SST2 = "reviews", "sst2"

_THINGS = ("film", "story", "plot", "script", "ending", "comedy", "drama", "thriller", "romance")
_THINGS_TOO = ("acting", "music", "dialogue", "pacing", "camera", "cast", "humour", "direction")
_WORDS = (
    *("charming", "clever", "moving", "warm", "bold", "tender", "vivid", "graceful", "honest"),
    *("dull", "clumsy", "hollow", "noisy", "lazy", "bitter", "pale", "tired", "shallow"),
)
_DEGREES = ("often", "quite", "rather", "utterly", "barely", "never", "always", "strangely")
_PEOPLE = ("children", "critics", "fans", "parents", "students", "lovers", "cynics", "strangers")
_VERBS = ("enjoy", "forget", "remember", "dislike", "admire", "regret", "cherish", "endure")
_PLACES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Texas", "Berlin", "Dublin")
_TEMPLATES = (
    "a {a} and {degree} {b} {thing}.",
    "the {thing} is {degree} {a}, but the {too} is {b}.",
    "even {people} will {verb} this {a} {thing} from {place}.",
    "its {too} lacks what {people} {degree} {verb}: a {a} {thing}.",
    "{degree} {a}, this {thing} about {people} in {place} has {b} {too} and little else.",
)


def made_up(count: int, seed: int) -> tuple[str, ...]:
    """Return sentences that depend on the seed alone."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        first, second = draw.sample(_WORDS, 2)
        found.append(
            draw.choice(_TEMPLATES).format(
                a=first,
                b=second,
                thing=draw.choice(_THINGS),
                too=draw.choice(_THINGS_TOO),
                degree=draw.choice(_DEGREES),
                people=draw.choice(_PEOPLE),
                verb=draw.choice(_VERBS),
                place=draw.choice(_PLACES),
            )
        )
    return tuple(found)


def missing_sst2(folder: Path = FOLDER) -> Need | None:
    """Return what is missing of SST-2; None if it can be read."""
    path = folder / "SST-2" / "train.tsv"
    return None if path.is_file() else Need(SST2, folder, f"{path}, with a column sentence")


def sst2(folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the sentences of GLUE's ``SST-2/train.tsv``."""
    need = missing_sst2(folder)
    if need is not None:
        raise BractError(str(need), code="file-missing")
    path = folder / "SST-2" / "train.tsv"
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    names = head.split("\t")
    if "sentence" not in names:
        raise BractError(
            f"{path}: columns are {names}, expected one named sentence", code="data-column"
        )
    at = names.index("sentence")
    return tuple(row.split("\t")[at].strip() for row in rows if row.count("\t") >= at)
