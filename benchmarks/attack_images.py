"""Images that attacks are scored on, and others that settings were chosen on. All are offline."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.data import open_source

SIZE = 32

PHOTOGRAPHS = {
    "score": ("astronaut", "coffee", "chelsea", "rocket"),
    "choose": ("retina", "hubble_deep_field", "immunohistochemistry"),
}

_CROP = 128
_CANDIDATES = 100


@dataclass(frozen=True)
class ImageSet:
    """Images to attack and others of their kind.

    Attributes
    ----------
    images, labels
        float32 ``(N, C, 32, 32)`` in [0, 1] and int64 ``(N,)``.
    candidates, candidate_labels
        Images that are not attacked: the pool for identifiability and the no-gradient baselines.
    """

    images: Tensor
    labels: Tensor
    candidates: Tensor
    candidate_labels: Tensor


def image_set(name: str, count: int, split: str) -> ImageSet:
    """Return ``digits`` (grey) or ``photos`` (colour) of the split ``score`` or ``choose``.

    Digits are scored on the last images of the test split and chosen on the training split.
    Photographs are crops of 128 pixels, reduced to 32, from those that scikit-image ships; the
    two splits share no photograph. Their labels are drawn at random: crops have no class.
    """
    if name == "digits":
        return _digits(count, split)
    return _photographs(count, split)


def _digits(count: int, split: str) -> ImageSet:
    source = open_source(DataConfig(name="digits"), "test" if split == "score" else "train")
    total = len(source.labels)
    chosen = list(range(total - count, total))
    rest = list(range(total - count - _CANDIDATES, total - count))
    return ImageSet(
        images=source.images(chosen, channels=1, size=SIZE),
        labels=source.labels[chosen],
        candidates=source.images(rest, channels=1, size=SIZE),
        candidate_labels=source.labels[rest],
    )


def _photographs(count: int, split: str) -> ImageSet:
    import skimage.data

    names = PHOTOGRAPHS[split]
    pictures = [
        torch.from_numpy(getattr(skimage.data, name)()).float().permute(2, 0, 1) / 255
        for name in names
    ]
    generator = torch.Generator().manual_seed(7)

    def draw(number: int) -> Tensor:
        crops = []
        for index in range(number):
            picture = pictures[index % len(pictures)]
            top, left = (
                int(torch.randint(0, side - _CROP, (1,), generator=generator))
                for side in picture.shape[1:]
            )
            crop = picture[None, :, top : top + _CROP, left : left + _CROP]
            crops.append(torch.nn.functional.interpolate(crop, size=(SIZE, SIZE), mode="area")[0])
        return torch.stack(crops)

    images, candidates = draw(count), draw(_CANDIDATES)
    return ImageSet(
        images=images,
        labels=torch.randint(10, (count,), generator=generator),
        candidates=candidates,
        candidate_labels=torch.randint(10, (_CANDIDATES,), generator=generator),
    )
