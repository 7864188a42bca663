"""Public images that an attacker may hold: a data set's split, or every picture below a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.data import DATASETS
from bract.data.sources import Split, fitted, open_source
from bract.errors import BractError, one_line

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
"""What counts as a picture in a folder."""


@dataclass(frozen=True)
class PublicImages:
    """Images to train a generator on.

    Attributes
    ----------
    images
        float32 ``(N, C, size, size)`` in [0, 1].
    labels
        int64 ``(N,)``, or None where there are none to use.
    classes
        Number of classes, 0 without labels.
    source
        Names them, for a report.
    """

    images: Tensor
    labels: Tensor | None
    classes: int
    source: str


def public_images(
    data: str,
    *,
    split: Split = "test",
    path: Path | None = None,
    size: int = 32,
    channels: int | None = None,
    most: int | None = None,
    crops: int = 1,
    labels: bool = True,
    seed: int = 0,
) -> PublicImages:
    """Read public images.

    Parameters
    ----------
    data
        Name of a data set, or else a folder, whose pictures are taken as stored, without labels.
    split
        Of a data set. bract's clients train on ``train``, so ``test`` shares no image with them.
    path
        Folder of the data set's files.
    channels
        1 or 3; None takes those of the data set, 3 of a folder.
    most
        Most images, drawn under ``seed``; None takes all.
    crops
        Squares cut from each picture of a folder at random; 1 takes the one in the middle.
    """
    generator = torch.Generator().manual_seed(seed)
    if data not in DATASETS or data == "folder":
        return _pictures(Path(data), size, channels or 3, most, crops, generator)
    if crops != 1:
        raise BractError(
            "--crops cuts pictures of a folder; leave it out for a data set", code="usage"
        )
    config = DataConfig(name=data, path=path, image_size=size)
    source = open_source(config, split)
    picks = torch.randperm(len(source.labels), generator=generator)[:most].sort().values
    return PublicImages(
        source.images(picks.tolist(), channels=channels or DATASETS[data].channels, size=size),
        source.labels[picks] if labels else None,
        source.classes if labels else 0,
        f"{data}, {split} split",
    )


def _pictures(
    root: Path,
    size: int,
    channels: int,
    most: int | None,
    crops: int,
    generator: torch.Generator,
) -> PublicImages:
    if not root.is_dir():
        known = ", ".join(name for name in DATASETS if name != "folder")
        raise BractError(
            f"--data {root}: no such folder, and no data set of that name; data sets are {known}",
            code="file-missing",
        )
    paths = [p for p in sorted(root.rglob("*")) if p.suffix.lower() in ENDINGS and p.is_file()]
    if not paths:
        raise BractError(
            f"--data {root}: no pictures below it ({', '.join(ENDINGS)})", code="data-empty"
        )
    order = torch.randperm(len(paths), generator=generator)[:most].tolist()
    made = [
        image
        for i in sorted(order)
        for image in _squares(_read(paths[i], channels), crops, size, generator)
    ]
    return PublicImages(torch.stack(made), None, 0, f"pictures below {root.resolve().name}")


def _read(path: Path, channels: int) -> Tensor:
    from PIL import Image
    from torchvision.transforms.functional import to_tensor

    try:
        with Image.open(path) as picture:
            image: Tensor = to_tensor(picture.convert("L" if channels == 1 else "RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise BractError(
            f"{path}: no picture that can be read ({one_line(error, 200)})", code="file-unreadable"
        ) from error
    return image


def _squares(image: Tensor, crops: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the largest square in the middle, or so many of random sizes and places."""
    height, width = image.shape[-2:]
    whole = min(height, width)
    for _ in range(crops):
        side, top, left = whole, (height - whole) // 2, (width - whole) // 2
        if crops > 1:
            side = _below(whole - min(size, whole), generator) + min(size, whole)
            top, left = (_below(room - side, generator) for room in (height, width))
        yield fitted(image[None, :, top : top + side, left : left + side], image.shape[0], size)[0]


def _below(most: int, generator: torch.Generator) -> int:
    """Draw a whole number from 0 to ``most``."""
    return int(torch.randint(most + 1, (1,), generator=generator))
