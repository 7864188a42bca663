from pathlib import Path
from typing import Any

import pytest
import torch

from bract.config import DataConfig
from bract.data import DATASETS, Dataset, Source
from bract.data.views import test_data as load_test_data
from bract.inputs import INPUTS
from bract.inputs.image import CANDIDATES, PER_CLASS, Reference

CLASSES, EACH = 4, 500


@pytest.fixture
def sorted_folder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set that lies class by class; image i is of the grey i / N, and each is counted."""
    count = CLASSES * EACH
    labels = torch.arange(count) // EACH
    read: list[int] = []

    def decode(index: Any) -> Any:
        read.append(index)
        return torch.full((1, 8, 8), index / count)

    dataset = Dataset(lambda *_: Source(labels, CLASSES, 1, decode), 1, CLASSES, (0.5,), (0.25,))
    monkeypatch.setitem(DATASETS._entries, "sorted", dataset)
    return DataConfig(name="sorted", image_size=8), read


def classes_of(images: Any) -> Any:
    return (images[:, 0, 0, 0] * CLASSES + 1e-6).long()


def test_candidates_are_of_every_class_and_only_they_are_decoded(sorted_folder: Any) -> None:
    data, read = sorted_folder
    found = Reference(data, 0).candidates
    assert len(found) == len(read) == len(set(read)) == CANDIDATES
    assert torch.bincount(classes_of(found), minlength=CLASSES).min() > 10
    assert torch.equal(Reference(data, 0).candidates, found)
    assert not torch.equal(Reference(data, 1).candidates, found)


def test_a_class_mean_decodes_a_capped_sample_of_that_class_once(sorted_folder: Any) -> None:
    data, read = sorted_folder
    reference = Reference(data, 0)
    first, second = reference.class_mean(torch.tensor([2, 2]))
    assert len(read) == PER_CLASS and all(2 * EACH <= i < 3 * EACH for i in read)
    assert torch.equal(first, second)
    assert float(first.mean()) == pytest.approx(2.5 / CLASSES, abs=0.05)
    assert torch.equal(reference.class_mean(torch.tensor([9]))[0], reference.candidates.mean(0))


def test_random_images_are_drawn_under_their_seed_and_nothing_else_is_decoded(
    sorted_folder: Any,
) -> None:
    data, read = sorted_folder
    reference = Reference(data, 0)
    drawn = reference.random_image(40, seed=3)
    assert len(read) == 40 and len(set(classes_of(drawn).tolist())) == CLASSES
    assert torch.equal(reference.random_image(40, seed=3), drawn)


def test_where_the_cap_does_not_bind_the_mean_is_that_of_all_test_images() -> None:
    data = DataConfig(name="digits", image_size=8)
    wanted = torch.tensor([7, 0])
    images, labels = load_test_data(data)
    expected = torch.stack([images[labels == label].mean(dim=0) for label in wanted])
    assert torch.allclose(Reference(data, 0).class_mean(wanted), expected)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
def test_an_image_of_any_number_of_channels_is_a_picture(channels: int, tmp_path: Path) -> None:
    example = torch.linspace(0, 1, channels * 6).view(channels, 2, 3)
    kind = INPUTS["image"]()
    name = kind.save(example, tmp_path / "a.json", 0, "original")
    kind.check_saved(name, (tmp_path / name).read_bytes())
