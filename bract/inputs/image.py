"""Images: float32 ``(C, H, W)`` in [0, 1], with 1 or 3 channels for data sets and pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.data import Source
from bract.data.sources import open_source
from bract.data.views import data_spec
from bract.disk.files import write_bytes
from bract.errors import BractError, in_words, shown
from bract.inputs.base import INPUTS, Input, References, Truth, content_bytes
from bract.inputs.targets import classes_of, numbers_of, several_of
from bract.schema import ClientDeclaration
from bract.schema.inputs import ImageOutline
from bract.seeds import derive_seed

CANDIDATES = 99
"""Images among which an original must be retrieved, beside itself."""

PER_CLASS = 100
"""Most images of a class that its mean, and what is near by chance, are taken from."""

MOST_PIXELS = 64 * 2**20
"""Most values of a picture that another process made."""

MOST_KEPT = 5000
"""Most kept images that are held in memory as references."""

_ROUNDING = 1e-3
"""By how much pixels may exceed [0, 1] for the rounding of a normalisation's figures."""

_NARROW = 0.25
"""A range of pixels below which their normalisation is doubted."""


@INPUTS.register("image")
class Image(ImageOutline, Input):
    """Images with classes, or numbers, as labels."""

    is_described = True
    neighbours = True
    suffix = ".png"

    def examples(self, batch: object) -> tuple[Tensor, Tensor] | None:
        """Return float inputs ``(B, C, H, W)`` and labels of a batch.

        Labels are classes, int64 ``(B,)`` or one-hot rows ``(B, classes)``, numbers, float32
        ``(B,)``, ``(B, 1)`` or ``(B, values)``, or several of 0 and 1, ``(B, classes)``.
        """
        return self._examples(batch)

    def examples_like(self, batch: object, label: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return `examples`; where an earlier label was numbers, numbers of that many values."""
        return self._examples(batch, label if label.is_floating_point() else None)

    def _examples(self, batch: object, like: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        if not isinstance(batch, Mapping | tuple | list):
            return None
        parts = dict(batch if isinstance(batch, Mapping) else enumerate(batch))
        tensors = {k: v.detach().cpu() for k, v in parts.items() if isinstance(v, Tensor)}
        images = [t for t in tensors.values() if t.dim() == 4 and t.is_floating_point() and len(t)]
        if not images:
            return None
        if like is None:
            label = classes_of(tensors)
            label = numbers_of(tensors) if label is None else label
            label = several_of(tensors) if label is None else label
        else:
            label = numbers_of(tensors, like)
            label = several_of(tensors) if label is None else label
        if label is None or len(images[0]) != len(label):
            return None
        return images[0].float().contiguous(), label

    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Return the originals, whose file may come from another party."""
        if "inputs" in kept:
            inputs = as_pictures(kept["inputs"], declaration.image_shape)
            images = pixels_of(inputs, declaration.mean, declaration.std)
        else:
            images = kept["images"]
        found = _checked(images, kept["labels"], declaration.image_shape)
        targets = kept.get("targets")
        return found if targets is None else replace(found, targets=_checked_rows(targets, found))

    def fitted(self, data: DataConfig, declaration: ClientDeclaration) -> DataConfig:
        """Return the section with the declared channels and side."""
        if declaration.image_shape is None:
            return data
        channels, size, width = declaration.image_shape
        if channels not in (1, 3):
            raise BractError(
                f"data holds images of 1 or 3 channels, the model takes {channels}; take the data "
                "section out",
                code="data-shape",
            )
        if size != width:
            raise BractError(
                f"data holds square images, the model takes {size}x{width}; take the data section "
                "out: scores are then compared with images that other clients kept",
                code="data-shape",
            )
        return data.model_copy(update={"channels": channels, "image_size": size})

    def references(self, data: DataConfig, seed: int) -> References:
        """Return images of the test split, of which only those that are drawn are decoded."""
        return Reference(data, seed)

    def kept_references(self, truths: Iterable[Truth], seed: int) -> References | None:
        """Return the images that clients kept, each once; those of another shape are left out."""
        kept = each_once(truths)
        if kept is None:
            return None
        images, labels = kept
        # Numbers are no classes: all images are of one.
        return KeptReference(images, labels if _are_classes(labels) else one_class(labels), seed)

    @classmethod
    def check_saved(cls, name: str, content: bytes) -> None:
        """Refuse what is no PNG of at most `MOST_PIXELS` values."""
        from PIL import Image as Pictures

        try:
            with Pictures.open(io.BytesIO(content), formats=["PNG"]) as picture:
                if picture.width * picture.height * len(picture.getbands()) > MOST_PIXELS:
                    raise BractError(
                        f"{name} has {picture.width} x {picture.height} pixels", code="file-damaged"
                    )
                picture.load()
        except (OSError, SyntaxError, ValueError, Pictures.DecompressionBombError) as error:
            raise BractError(
                f"{name} is no PNG picture: {shown(in_words(error))}", code="file-damaged"
            ) from error

    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write a PNG of the image's own resolution; the mean of channels that are no colours."""
        from PIL import Image as Pictures

        seen = example if example.shape[0] in (1, 3) else example.mean(dim=0, keepdim=True)
        pixels = (seen.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        path = beside.with_name(f"{beside.stem}--{index:02d}-{role}{self.suffix}")
        content = io.BytesIO()
        squeezed = pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels
        Pictures.fromarray(squeezed).save(content, "PNG")
        return write_bytes(path, content.getvalue()).name


def one_class(labels: Tensor) -> Tensor:
    """Return class 0 for each label, int64 ``(N,)``."""
    return torch.zeros(len(labels), dtype=torch.int64)


def _are_classes(labels: Tensor) -> bool:
    return not labels.is_floating_point()


def each_once(truths: Iterable[Truth]) -> tuple[Tensor, Tensor] | None:
    """Return examples ``(N, ...)`` of clients and their labels, each once, at most `MOST_KEPT`.

    Those of another shape than the first are left out. None where there are none.
    """
    pool: dict[bytes, tuple[Tensor, Tensor]] = {}
    shape: torch.Size | None = None
    for truth in truths:
        shape = shape or truth.images.shape[1:]
        if truth.images.shape[1:] != shape:
            continue
        for example, label in zip(truth.images, truth.labels, strict=True):
            if len(pool) < MOST_KEPT:
                pool.setdefault(content_bytes(example), (example, label))
    if not pool:
        return None
    examples, labels = (torch.stack([pair[i] for pair in pool.values()]) for i in (0, 1))
    return examples, labels


@dataclass
class Reference:
    """The test split, of which only the images that are drawn are decoded.

    Data sets are sorted by class in many folders, so everything is drawn at random under a seed.

    Parameters
    ----------
    data
        Whose test split.
    seed
        The audit's.

    Attributes
    ----------
    mean_name, random_name
        Names of its baselines.
    """

    mean_name: ClassVar[str] = "class_mean"
    random_name: ClassVar[str] = "random_image"

    data: DataConfig
    seed: int
    _means: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def candidates(self) -> Tensor:
        """The images among which originals are looked for, ``(CANDIDATES, C, H, W)``."""
        return self._decode(self._order[:CANDIDATES])

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean image of each wanted label ``(N,)``, as ``(N, C, H, W)``.

        A label without test images gets the mean of the candidates.
        """
        return torch.stack([self._mean(int(label)) for label in wanted])

    def random_image(self, count: int, *, seed: int) -> Tensor:
        """Return images drawn with replacement, ``(count, C, H, W)``."""
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(self._source.labels), (count,), generator=generator)
        return self._decode(picks)

    def of_class(self, label: int) -> Tensor:
        """Return up to `PER_CLASS` images with this label, ``(M, C, H, W)``."""
        mine = self._order[self._source.labels[self._order] == label][:PER_CLASS]
        images = self._decode(mine)
        self._means[label] = (images if len(mine) else self.candidates).mean(dim=0)
        return images

    def baselines(self, labels: Tensor, count: int, *, seed: int) -> dict[str, Tensor]:
        """Return the mean image of each label in turn, and images drawn at random."""
        wanted = labels[torch.arange(count) % len(labels)]
        return {
            self.mean_name: self.class_mean(wanted),
            self.random_name: self.random_image(count, seed=seed),
        }

    def without(self, truth: Truth) -> Reference | None:
        """Return itself: no client trained on test data."""
        del truth
        return self

    def _mean(self, label: int) -> Tensor:
        if label not in self._means:
            self.of_class(label)
        return self._means[label]

    @cached_property
    def _source(self) -> Source:
        return open_source(self.data, "test")

    @cached_property
    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "reference"))
        return torch.randperm(len(self._source.labels), generator=generator)

    @cached_property
    def _shape(self) -> tuple[int, int, int]:
        return data_spec(self.data).image_shape

    def _decode(self, indices: Tensor) -> Tensor:
        channels, size, _ = self._shape
        return self._source.images(indices.tolist(), channels=channels, size=size)


class KeptReference(Reference):
    """Examples that clients kept; those of one client's update are taken out by `without`.

    Parameters
    ----------
    images, labels
        float32 ``(N, C, H, W)`` in [0, 1] and int64 ``(N,)``, N >= 1.
    seed
        The audit's.
    """

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__(DataConfig(), seed)
        self._images, self._labels = images, labels

    @cached_property
    def _source(self) -> Source:
        return Source(
            labels=self._labels,
            classes=int(self._labels.max()) + 1,
            channels=self._images.shape[1],
            read=lambda i: self._images[i],
        )

    def _decode(self, indices: Tensor) -> Tensor:
        return self._images[indices]

    def without(self, truth: Truth) -> Self | None:
        """Return all of them but these originals; None where nothing is left."""
        own = {content_bytes(example) for example in truth.images}
        left = torch.tensor([content_bytes(example) not in own for example in self._images])
        return self._holding(self._images[left], self._labels[left]) if bool(left.any()) else None

    def _holding(self, images: Tensor, labels: Tensor) -> Self:
        """Return references alike that hold other examples."""
        return type(self)(images, labels, self.seed)


def as_pictures(inputs: Tensor, shape: tuple[int, int, int] | None = None) -> Tensor:
    """Return kept inputs without a dimension of channels as ``(N, C, H, W)``.

    Parameters
    ----------
    inputs
        ``(N, H, W)``, or rows ``(N, values)`` of pictures of a shape, by default of one channel and
        square; what fits neither is returned as it is.
    """
    if inputs.dim() == 3 and shape in (None, (1, *inputs.shape[1:])):
        return inputs[:, None]
    if inputs.dim() == 2 and inputs.is_floating_point():
        side = math.isqrt(inputs.shape[1])
        shape = shape or (1, side, side)
        if math.prod(shape) == inputs.shape[1]:
            return inputs.reshape(-1, *shape)
    return inputs


def pixels_of(inputs: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return the pixels in [0, 1] of model inputs ``(N, C, H, W)``.

    A normalisation whose ``std`` is too small squeezes pixels together, which flatters every
    distance in them. So pixels that cover less than a quarter of their range count only where they
    are on the 256 steps of a picture file.
    """
    if inputs.dim() != 4 or inputs.dtype != torch.float32 or not len(inputs):
        raise BractError(
            f"inputs are {inputs.dtype} {tuple(inputs.shape)}, expected (N, C, H, W)",
            code="data-shape",
        )
    channels = inputs.shape[1]
    scale, shift = (
        torch.tensor(tuple(values) if values else (other,) * channels)
        for values, other in ((std, 1.0), (mean, 0.0))
    )
    if len(scale) != channels or len(shift) != channels:
        raise BractError(
            f"inputs have {channels} channels, the normalisation has {len(shift)}; "
            "correct input.mean and input.std",
            code="data-shape",
        )
    pixels = inputs * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
    low, high = float(pixels.min()), float(pixels.max())
    if not -_ROUNDING <= low <= high <= 1.0 + _ROUNDING:
        raise BractError(
            f"the client's inputs give pixels from {low:.3g} to {high:.3g}, expected 0 to 1; "
            f"its inputs are {float(inputs.min()):.3g} to {float(inputs.max()):.3g}: correct "
            "input.mean and input.std; where each client takes statistics of its own no values fit "
            "all: let them take the same ones",
            code="data-value",
        )
    if high - low < _NARROW and not on_steps(pixels):
        raise BractError(
            f"the client's inputs give pixels from {low:.3g} to {high:.3g}, a small part of 0 to "
            f"1, and not on a picture's 256 steps; its inputs are {float(inputs.min()):.3g} to "
            f"{float(inputs.max()):.3g}: correct input.mean and input.std",
            code="data-value",
        )
    return pixels.clamp(0.0, 1.0)


def on_steps(pixels: Tensor) -> bool:
    """Return whether pixels in [0, 1] are on the 256 steps of a picture file."""
    steps = pixels * 255.0
    return bool(((steps - steps.round()).abs() < 0.02).all())


def _checked_rows(targets: Tensor, truth: Truth) -> Tensor:
    """Check probabilities of classes, whose file may come from another party."""
    if targets.dtype != torch.float32 or targets.dim() != 2 or len(targets) != len(truth.images):
        raise BractError(
            f"targets are {targets.dtype} {tuple(targets.shape)}, expected float32 "
            f"({len(truth.images)}, classes)",
            code="data-shape",
        )
    whole = targets.double().sum(dim=1)
    if not bool((targets >= 0.0).all()) or not bool(((whole - 1.0).abs() < _ROUNDING).all()):
        raise BractError("targets are no probabilities: they sum to 1 of each", code="data-value")
    return targets


def _checked(images: Tensor, labels: Tensor, shape: tuple[int, int, int] | None) -> Truth:
    """Check the truth, whose file may come from another party."""
    count = images.shape[:1]
    if images.dtype != torch.float32 or images.dim() != 4 or not len(images):
        raise BractError(
            f"images are {images.dtype} {tuple(images.shape)}, expected (N, C, H, W)",
            code="data-shape",
        )
    if shape is not None and tuple(images.shape[1:]) != shape:
        raise BractError(
            f"images are {tuple(images.shape[1:])}, the capture declares {shape}", code="data-shape"
        )
    numbers = labels.dtype == torch.float32 and labels.dim() <= 2
    if labels.shape[:1] != count or not (
        numbers or (labels.dtype == torch.int64 and labels.dim() == 1)
    ):
        raise BractError(
            f"labels are {labels.dtype} {tuple(labels.shape)}, expected {count}", code="data-shape"
        )
    if not bool(((images >= 0.0) & (images <= 1.0)).all()):
        raise BractError("images have values outside of [0, 1]", code="data-value")
    if not bool(labels.isfinite().all() if numbers else (labels >= 0).all()):
        raise BractError("labels are below 0, or not finite", code="data-value")
    return Truth(images, labels)
