"""Copies of known images are told by reduced images, against a search that tries each of them."""

import pytest
import torch
from torch.nn import functional as F

from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract_priors.fingerprints import copies_among, fingerprints


def pictures(count: int, size: int, channels: int = 1, seed: int = 0) -> torch.Tensor:
    """Smooth pictures, bright at their edges too."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 5, 5, generator=generator)
    return F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)


def shifted(images: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """What moves in at the edge is random."""
    generator = torch.Generator().manual_seed(9)
    height, width = images.shape[-2:]
    around = torch.rand(*images.shape[:2], 3 * height, 3 * width, generator=generator)
    around[..., height : 2 * height, width : 2 * width] = images
    return around[..., height - down : 2 * height - down, width - right : 2 * width - right]


def turned(images: torch.Tensor, which: int) -> torch.Tensor:
    found = torch.rot90(images, which % 4, (-2, -1))
    return found.flip(-1) if which >= 4 else found


@pytest.mark.parametrize(("size", "most"), [(8, 1), (16, 2), (28, 3), (32, 4), (64, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_mirrored_turned_and_shifted_copies_are_known(size: int, most: int, channels: int) -> None:
    images = pictures(3, size, channels)
    known = fingerprints(images)
    for which in range(8):
        for down, right in ((0, 0), (most, -most), (-1, most), (-most, 0)):
            # Either the client's image is the copy, or the public one.
            assert copies_among(shifted(turned(images, which), down, right), known).all()
            assert copies_among(turned(shifted(images, down, right), which), known).all()
    assert not copies_among(shifted(images, most + 2, 0), known).any()
    assert not copies_among(pictures(3, size, channels, seed=1), known).any()
    assert not copies_among(images.clamp(0.1, 1.0) * 0.8, known).any()


def test_the_search_agrees_with_trying_each_copy() -> None:
    images = pictures(6, 16)
    known = fingerprints(pictures(40, 16, seed=3))
    made = torch.cat([images, turned(shifted(pictures(40, 16, seed=3)[7:8], 1, -2), 5)])
    made = torch.cat([made, shifted(pictures(40, 16, seed=3)[9:10], 3, 0)])

    def among(image: torch.Tensor) -> bool:
        for which in range(8):
            for down in range(-2, 3):
                for right in range(-2, 3):
                    one = turned(shifted(image[None], down, right), which)
                    edge = turned(shifted(torch.ones(1, 1, 16, 16), down, right), which)
                    whole = F.adaptive_avg_pool2d((edge == 1.0).float(), 8).flatten() == 1.0
                    off = (fingerprints(one).int() - known.int()).abs()[:, whole]
                    if bool((off.amax(dim=1) <= 2).any()):
                        return True
        return False

    assert copies_among(made, known).tolist() == [among(image) for image in made]
    assert copies_among(made, known).tolist() == [False] * 6 + [True, False]


@pytest.mark.parametrize("size", [8, 16, 28])
def test_two_digits_are_no_copies_of_each_other(size: int) -> None:
    images = load_test_data(DataConfig(image_size=size))[0]
    half = len(images) // 2
    assert half > 100
    assert not copies_among(images[:half], fingerprints(images[half:])).any()
    assert copies_among(images[:half].flip(-1), fingerprints(images)).all()


def test_nothing_is_a_copy_of_no_images_or_of_those_of_other_channels() -> None:
    images = pictures(2, 16)
    assert copies_among(images, fingerprints(images)[:0]).tolist() == [False, False]
    colour = fingerprints(pictures(2, 16, channels=3))
    assert copies_among(images, colour).tolist() == [False, False]
