"""The text sets of thesis section 4.3.2 by path: Synth90K, crops of SynthText, four test sets.

``synth90k`` is read as it is published. Each of the others is a folder of cropped words with a file
``labels.tsv``, one line ``IMAGE<TAB>WORD`` a word. As in the thesis, words count without case, and
what holds other than letters and digits, or fewer than 3 or more than 25 of them, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bract.errors import BractError, one_line
from experiments.harness.data_folders import SCENE_TEXT, Need
from experiments.harness.words import CHARACTERS

TRAINING = ("synth90k", "synthtext")
"""One of them at each client, in this order."""

TESTS = ("iiit5k", "svt", "scut", "ic15")

_PUBLISHED = "annotation_train.txt"
_LABELS = "labels.tsv"
_SHORTEST, _LONGEST = 3, 25


@dataclass(frozen=True)
class Crops(Dataset[Any]):
    """Cropped words on disk, grey, scaled to ``(height, width)`` whatever their shape.

    Attributes
    ----------
    files, words
        Images below ``folder``, and what they say, in lower case.
    """

    folder: Path
    files: list[str]
    words: list[str]
    height: int
    width: int

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.words)

    def __getitem__(self, number: int) -> tuple[Tensor, str]:
        """Return one image ``(1, height, width)``, float32 in [0, 1], and its word.

        Raises
        ------
        BractError
            If the image cannot be read.
        """
        path = self.folder / self.files[number]
        try:
            with Image.open(path) as opened:
                size = (self.width, self.height)
                image = opened.convert("L").resize(size, Image.Resampling.BILINEAR)
        except (OSError, SyntaxError, ValueError) as error:
            raise BractError(
                f"{path}: no image that can be read ({one_line(error, 200)}); take its line out "
                "of the labels, or unpack the data set again",
                code="file-damaged",
            ) from error
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255.0)
        return pixels[None], self.words[number]

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield the images and words of each part, read ahead by other processes."""
        workers = max(0, min(16, (os.cpu_count() or 1) - 1)) if len(parts) > 1 else 0
        yield from DataLoader(
            self,
            batch_sampler=[list(part) for part in parts],
            num_workers=workers,
            collate_fn=_together,
            generator=torch.Generator().manual_seed(0),
        )


def _together(found: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    return torch.stack([image for image, _ in found]), [word for _, word in found]


def missing_text(folder: Path) -> Need | None:
    """Say which of the sets is not below a folder; None where all are."""
    for name in (*TRAINING, *TESTS):
        file = _labels(folder, name)
        if file.is_file():
            continue
        if name == "synth90k":
            layout = f"{file} and the images that it names, as Synth90K is published"
        else:
            layout = f"{file}, a line IMAGE<TAB>WORD for every cropped word below {file.parent}/"
        return Need(SCENE_TEXT, folder, layout)
    return None


def open_text(folder: Path, name: str, height: int, width: int) -> Crops:
    """Open one of `TRAINING` or `TESTS`.

    Raises
    ------
    BractError
        If its labels cannot be read, a line of them is none, or no word is left.
    """
    file = _labels(folder, name)
    files, words = [], []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                image, word = _entry(file, number, line.rstrip("\r\n"))
                word = word.lower()
                if _SHORTEST <= len(word) <= _LONGEST and set(word) <= _KNOWN:
                    files.append(image)
                    words.append(word)
    except (OSError, UnicodeError) as error:
        raise BractError(
            f"{file}: cannot be read ({one_line(error, 200)})", code="file-unreadable"
        ) from error
    if not words:
        raise BractError(
            f"{file}: names no word of {_SHORTEST} to {_LONGEST} letters and digits; check that "
            "it is the labels of this data set",
            code="data-empty",
        )
    return Crops(file.parent, files, words, height, width)


_KNOWN = set(CHARACTERS)


def _entry(file: Path, number: int, line: str) -> tuple[str, str]:
    """Return a line's image and word; Synth90K writes words into the names of its images."""
    if file.name == _PUBLISHED:
        image, _, _ = line.partition(" ")
        parts = Path(image).stem.split("_")
        if len(parts) != 3:
            raise BractError(
                f"{file}:{number}: found {line[:80]!r}, expected FOLDER/NUMBER_WORD_NUMBER.jpg "
                "NUMBER as Synth90K is published",
                code="file-damaged",
            )
        return image, parts[1]
    image, tab, word = line.partition("\t")
    if not (image and tab and word):
        raise BractError(
            f"{file}:{number}: found {line[:80]!r}, expected IMAGE<TAB>WORD", code="file-damaged"
        )
    return image, word


def _labels(folder: Path, name: str) -> Path:
    return folder / name / (_PUBLISHED if name == "synth90k" else _LABELS)
