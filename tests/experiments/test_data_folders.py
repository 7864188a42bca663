"""Data sets by path: raw and packed files alike, and what is said where they are not."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from experiments.harness import mnist_package
from experiments.harness.data_folders import missing, open_by_path
from experiments.harness.images import image_set

IDX = {
    "train-images-idx3-ubyte": (130, 28, 28),
    "train-labels-idx1-ubyte": (130,),
    "t10k-images-idx3-ubyte": (130, 28, 28),
    "t10k-labels-idx1-ubyte": (130,),
}


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_package, "available", lambda: False)


def idx(shape: tuple[int, ...]) -> bytes:
    pixels = (np.arange(np.prod(shape)) % 10).astype(np.uint8)
    return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + pixels.tobytes()


def mnist(folder: Path, packed: bool) -> None:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, shape in IDX.items():
        content = idx(shape)
        path = raw / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_raw_and_gzipped(packed: bool, tmp_path: Path) -> None:
    mnist(tmp_path, packed)
    source = open_by_path("mnist", tmp_path, "test")
    assert source.labels.tolist()[:11] == [*range(10), 0]
    assert source.read(0)[0, 0, :3].tolist() == pytest.approx([0, 1 / 255, 2 / 255])
    assert image_set("mnist", 8, "score", folder=tmp_path).images.shape == (8, 1, 32, 32)


def batch() -> bytes:
    content = {"data": np.full((30, 3072), 51, np.uint8), "labels": [i % 10 for i in range(30)]}
    return pickle.dumps(content, protocol=2)


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_is_read_unpacked_and_packed(packed: bool, tmp_path: Path) -> None:
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    if packed:
        with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
            for name in files:
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(batch())
                archive.addfile(member, io.BytesIO(batch()))
    else:
        (tmp_path / "cifar-10-batches-py").mkdir()
        for name in files:
            (tmp_path / "cifar-10-batches-py" / name).write_bytes(batch())
    source = open_by_path("cifar10", tmp_path, "train")
    assert len(source.labels) == 150
    assert source.read(3).shape == (3, 32, 32)
    assert float(source.read(3).mean()) == pytest.approx(0.2)


def test_a_pickle_that_names_code_is_refused(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return (print, ("no",))

    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(Bad()))
    with refused("file-damaged", tmp_path):
        open_by_path("cifar10", tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mnist", ("file-missing", "MNIST/raw/", "train-images-idx3-ubyte")),
        ("fashion-mnist", ("file-missing", "fashion-mnist")),
        ("cifar10", ("file-missing", "cifar-10-python.tar.gz")),
        ("clothes", ("file-missing", "fashion-mnist-sprite.png")),
        ("ilsvrc2012", ("file-missing", "test/CLASS/IMAGE")),
    ],
)
def test_a_data_set_that_is_not_there_names_path_and_layout(
    name: str, layout: tuple[str, ...], tmp_path: Path
) -> None:
    with refused(*layout) as caught:
        open_by_path(name, tmp_path, "test")
    assert str(tmp_path) in str(caught.value)
    assert missing("digits", tmp_path) is None


def test_images_of_a_sprite_are_cut_out_with_their_classes(tmp_path: Path) -> None:
    """Lines of thirty images of 28 pixels, three a class; splits share none."""
    lines = np.arange(30, dtype=np.uint8).repeat(28)[:, None].repeat(30 * 28, axis=1)
    Image.fromarray(lines).save(tmp_path / "fashion-mnist-sprite.png")
    for split in ("train", "test"):
        source = open_by_path("clothes", tmp_path, split)
        assert source.labels.bincount().tolist() == [45] * 10
        image = source.read(7)
        assert image.shape == (1, 28, 28)
        assert float(image.max()) * 255 // 3 == int(source.labels[7])
    (tmp_path / "fashion-mnist-sprite.png").write_bytes(b"no picture")
    with refused("file-damaged", "fashion-mnist-sprite.png"):
        open_by_path("clothes", tmp_path, "test")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    mnist(tmp_path, packed=False)
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:100])
    with refused("file-damaged", "t10k-images-idx3-ubyte", "IDX"):
        open_by_path("mnist", tmp_path, "test")


def faces(folder: Path, people: int = 3, images: int = 40) -> None:
    for split in ("train", "test"):
        for person in range(people):
            place = folder / "vggface" / split / f"person{person}"
            place.mkdir(parents=True)
            for number in range(images):
                shade = (60 * person + 40, number, 0)
                Image.new("RGB", (8, 8), shade).save(place / f"{number:03}.png")


def test_images_of_folders_are_of_mixed_classes(tmp_path: Path) -> None:
    # A row attacks the last images; unmixed they would all be of one person.
    faces(tmp_path)
    found = image_set("vggface", 12, "score", folder=tmp_path)
    assert set(found.labels.tolist()) == {0, 1, 2}
    assert found.classes == 3
    for image, label in zip(found.images, found.labels.tolist(), strict=True):
        assert float(image[0].mean()) == pytest.approx((60 * label + 40) / 255, abs=1e-3)


def test_a_folder_without_a_training_split_is_missing(tmp_path: Path) -> None:
    (tmp_path / "vggface" / "test").mkdir(parents=True)
    assert missing("vggface", tmp_path) is not None
