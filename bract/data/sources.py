"""Where images come from: the embedded digits, torchvision's data sets, image folders.

A source knows its labels at once and decodes images on request, so that a client decodes its own
part only.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bract.config import DataConfig
from bract.data.spec import DataSpec
from bract.errors import BractError, one_line
from bract.installed.plugins import blaming
from bract.registry import Registry

Split = Literal["train", "test"]

_FOLDER = Path("data")
"""Folder of torchvision's data sets while the configuration names no path."""


_TOGETHER = 1 << 20
"""Values of images that are fitted together."""


@dataclass(frozen=True)
class Source:
    """One split of a data set.

    Attributes
    ----------
    labels
        int64 ``(N,)``.
    classes
        Number of classes.
    channels
        1 or 3, as the files hold them.
    read
        ``read(i)`` returns image ``i`` as float32 ``(channels, height, width)`` in [0, 1].
    """

    labels: Tensor
    classes: int
    channels: int
    read: Callable[[int], Tensor]

    def images(self, indices: Sequence[int], *, channels: int, size: int) -> Tensor:
        """Decode images as float32 ``(n, channels, size, size)`` in [0, 1].

        Other resolutions are resized bilinearly with anti-aliasing; grey is repeated to colour,
        colour is averaged to grey.
        """
        if not len(indices):
            return torch.empty(0, channels, size, size)
        # Images of one shape are fitted together, which is faster for small ones.
        done, waiting = [], [self.read(int(indices[0]))]
        for i in indices[1:]:
            image = self.read(int(i))
            many = image.numel() * len(waiting) >= _TOGETHER
            if many or image.shape != waiting[0].shape:
                done.append(fitted(torch.stack(waiting), channels, size))
                waiting.clear()
            waiting.append(image)
        return torch.cat([*done, fitted(torch.stack(waiting), channels, size)])


@dataclass(frozen=True)
class Dataset:
    """How to open a data set, and what is known before it is opened.

    ``mean`` and ``std`` are per channel, of the pixels in [0, 1]; None for image folders, whose
    normalisation is then 0.5 and 0.25 in every channel. ``folder`` has its files while the
    configuration names no path; None where it has none.
    """

    open: Callable[[DataConfig, Split], Source]
    channels: int
    classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    folder: Path | None = None

    def splits_rows(self, config: DataConfig) -> bool:
        """Return whether both splits are rows of one file of the site's, by their positions in
        it.
        """
        del config
        return False

    def known_spec(self, config: DataConfig) -> DataSpec | None:
        """Return `spec` where the configuration gives it; None where a file is read for it."""
        return None if self.classes is None else self.spec(config)

    def spec(self, config: DataConfig) -> DataSpec:
        """Return shape and normalisation; opens the data only to count its classes."""
        if config.input == "table" or config.table is not None:
            raise BractError(
                f"data.name {config.name!r} holds images, the configuration declares a table; take "
                "data.table and data.input out, or name a table",
                code="input-mismatch",
            )
        channels = config.channels or self.channels
        classes = self.classes or self.open(config, "train").classes
        if config.normalisation == "none":
            mean, std = (0.0,) * channels, (1.0,) * channels
        else:
            mean, std = _to_channels(self.mean, channels), _to_channels(self.std, channels)
        return DataSpec((channels, config.image_size, config.image_size), classes, mean, std)


DATASETS: Registry[Dataset] = Registry(
    "data set",
    group="bract.data",
    check=lambda _, entry: None if isinstance(entry, Dataset) else f"{entry!r} is no Dataset",
)


def open_source(config: DataConfig, split: Split) -> Source:
    """Open one split of the configured data set.

    Raises
    ------
    BractError
        If it cannot be opened; of another package's data set it names the package.
    """
    dataset = DATASETS[config.name]
    with blaming(getattr(dataset.open, "func", dataset.open)):
        return dataset.open(config, split)


def fitted(images: Tensor, channels: int, size: int) -> Tensor:
    """Return images ``(n, c, h, w)`` with these channels and this side, as `Source.images` does."""
    if images.shape[1] != channels:
        images = images.expand(-1, 3, -1, -1) if channels == 3 else images.mean(1, keepdim=True)
    if images.shape[-2:] != (size, size):
        images = F.interpolate(
            images, size=(size, size), mode="bilinear", antialias=True, align_corners=False
        )
    return images.clamp(0.0, 1.0)


def _to_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return values
    return values * 3 if channels == 3 else (sum(values) / len(values),)


@cache
def _digits() -> Tensor:
    """Return scikit-learn's copy of UCI's handwritten digits, int64 ``(1797, 65)``.

    Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), CC BY 4.0.

    The last column is the label. The file comes along, since importing scikit-learn to read it
    takes a client 0.1 GB.
    """
    packed = (resources.files("bract.data") / "digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    return torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.int64))


def _open_digits(config: DataConfig, split: Split) -> Source:
    del config
    rows = _digits()
    images = rows[:, :-1].to(torch.float32).reshape(-1, 1, 8, 8) / 16.0
    labels = rows[:, -1]
    # Every fifth image is test data: the file lists writers one after another, so both splits
    # hold every writer and every class.
    is_test = torch.arange(len(labels)) % 5 == 0
    kept = torch.nonzero(is_test if split == "test" else ~is_test).flatten()
    images, labels = images[kept], labels[kept]
    return Source(labels=labels, classes=10, channels=1, read=lambda i: images[i])


def _torchvision(class_name: str, folder: str) -> Callable[[DataConfig, Split], Source]:
    def open_split(config: DataConfig, split: Split) -> Source:
        import torchvision
        from torchvision.transforms.functional import to_tensor

        root = config.path or _FOLDER
        try:
            dataset: Any = getattr(torchvision.datasets, class_name)(
                root=str(root), train=split == "train", download=config.download
            )
        except (RuntimeError, OSError) as error:
            raise BractError(
                f"data.name {config.name!r}: not found below {root} "
                f"({one_line(error, 200)}); set data.path to the folder that holds "
                f"{folder}, or let a client download it there by data.download: true",
                code="file-missing",
            ) from error
        labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
        first = to_tensor(dataset[0][0])
        return Source(
            labels=labels,
            classes=len(dataset.classes),
            channels=int(first.shape[0]),
            read=lambda i: to_tensor(dataset[i][0]),
        )

    return open_split


def _open_folder(config: DataConfig, split: Split) -> Source:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.functional import to_tensor

    if config.path is None:
        raise BractError(
            "data.name 'folder' needs data.path, the folder that holds train/ and test/",
            code="config-key",
        )
    root = config.path / split
    try:
        dataset = ImageFolder(str(root))
    except (FileNotFoundError, OSError) as error:
        raise BractError(
            f"data.path: {root} holds no images in class folders ({one_line(error, 200)}); "
            f"expected {root}/<class>/<image>",
            code="data-empty",
        ) from error

    def read(index: int) -> Tensor:
        image: Tensor = to_tensor(dataset[index][0])
        return image

    return Source(
        labels=torch.tensor(dataset.targets, dtype=torch.int64),
        classes=len(dataset.classes),
        channels=3,
        read=read,
    )


DATASETS.register("digits")(Dataset(_open_digits, 1, 10, (0.3053,), (0.3760,)))
DATASETS.register("mnist")(
    Dataset(_torchvision("MNIST", "MNIST/raw"), 1, 10, (0.1307,), (0.3081,), _FOLDER)
)
DATASETS.register("fashion-mnist")(
    Dataset(_torchvision("FashionMNIST", "FashionMNIST/raw"), 1, 10, (0.2860,), (0.3530,), _FOLDER)
)
DATASETS.register("cifar10")(
    Dataset(
        _torchvision("CIFAR10", "cifar-10-batches-py"),
        3,
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        _FOLDER,
    )
)
DATASETS.register("cifar100")(
    Dataset(
        _torchvision("CIFAR100", "cifar-100-python"),
        3,
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        _FOLDER,
    )
)
DATASETS.register("folder")(Dataset(_open_folder, 3, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
