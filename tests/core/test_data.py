from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner
from PIL import Image
from refusals import refused
from sklearn.datasets import load_digits

from bract.config import DataConfig, build_config
from bract.config.config import IidPartition
from bract.data.partition import partition_indices
from bract.data.sources import Source, open_source
from bract.data.views import client_data, data_spec
from bract.data.views import test_data as held_out


def federation(**data: Any) -> Any:
    return build_config({"data": {"validation": 0.0, **data}})


@pytest.mark.parametrize(
    "partition",
    [
        {"kind": "iid"},
        {"kind": "dirichlet", "alpha": 0.5},
        {"kind": "shards", "shards_per_client": 2},
        {"kind": "sizes", "sizes": [500, 30, 4]},
    ],
)
def test_parts_are_disjoint_seeded_and_inside_the_training_split(partition: Any) -> None:
    config = federation(partition=partition)
    labels = open_source(config.data, "train").labels

    def part(client: Any, seed: Any = 0) -> Any:
        return partition_indices(labels, config.data.partition, clients=3, client=client, seed=seed)

    parts = [part(c) for c in range(3)]
    together = [i for p in parts for i in p]
    assert len(together) == len(set(together))
    assert set(together) <= set(range(len(labels)))
    assert part(1) == parts[1]
    assert part(1, seed=1) != parts[1]
    if partition["kind"] == "sizes":
        assert [len(p) for p in parts] == [500, 30, 4]
    else:  # shards of one size leave a remainder out
        assert len(labels) - 6 < len(together) <= len(labels)


def test_iid_parts_are_those_of_flwr_datasets() -> None:
    labels = torch.arange(103) % 10
    order = np.random.default_rng(5).permutation(103)
    for clients in (1, 4, 10, 103):
        partitioner = IidPartitioner(num_partitions=clients)
        partitioner.dataset = Dataset.from_dict({"index": order, "label": labels.numpy()[order]})
        for client in range(clients):
            part = partition_indices(
                labels, IidPartition(kind="iid"), clients=clients, client=client, seed=5
            )
            assert part == list(partitioner.load_partition(client)["index"])


def test_shards_leave_each_client_few_classes() -> None:
    config = federation(partition={"kind": "shards", "shards_per_client": 2})
    counts = [len(set(client_data(config, c).labels.tolist())) for c in range(3)]
    assert all(count < 10 for count in counts)


def test_the_bundled_digits_are_scikit_learn_s() -> None:
    bundle = load_digits()
    found = [open_source(federation().data, split) for split in ("train", "test")]
    test = torch.arange(len(bundle.target)) % 5 == 0
    for source, kept in zip(found, (~test, test), strict=True):
        assert torch.equal(source.labels, torch.from_numpy(bundle.target).long()[kept])
        images = torch.stack([source.read(i)[0] for i in range(len(source.labels))])
        assert torch.equal(images, torch.from_numpy(bundle.images).float()[kept] / 16)


def test_digits_come_in_the_unit_interval_at_the_asked_size_and_no_test_image_trains() -> None:
    config = federation(image_size=16)
    images = torch.cat([client_data(config, c).images for c in range(3)])
    assert images.shape[1:] == (1, 16, 16)
    assert 0.0 <= float(images.min()) < float(images.max()) <= 1.0
    test_images, labels = held_out(config.data)
    assert len(test_images) == len(labels) == 360
    assert len(images) + len(test_images) == 1797


def test_the_declared_normalisation_is_that_of_the_training_images() -> None:
    spec = data_spec(DataConfig(image_size=8))
    images = client_data(federation(image_size=8, partition={"kind": "iid"}), 0).images
    inputs = spec.normalise(images)
    assert abs(float(inputs.mean())) < 0.05
    assert abs(float(inputs.std()) - 1.0) < 0.05
    torch.testing.assert_close(spec.denormalise(inputs), images)


def test_the_validation_share_is_set_apart() -> None:
    whole = client_data(federation(), 0)
    split = client_data(federation(validation=0.25), 0)
    assert len(split.validation_images) == int(len(whole.images) * 0.25)
    assert len(split.validation_images) + len(split.images) == len(whole.images)


def test_an_image_folder_is_read_and_its_classes_counted(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name, colour in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (40, 30), colour).save(folder / f"{i}.png")
    config = federation(name="folder", path=str(tmp_path), image_size=16)
    spec = data_spec(config.data)
    assert (spec.image_shape, spec.classes) == ((3, 16, 16), 2)
    part = client_data(config, 0)
    assert part.images.shape == (2, 3, 16, 16)
    cat = part.images[part.labels == 0]
    if len(cat):
        torch.testing.assert_close(cat[0].mean((1, 2)), torch.tensor([1.0, 0.0, 0.0]))


def test_a_client_without_examples_or_outside_the_partition_is_refused() -> None:
    config = federation()
    with refused("data-partition", 3, "0..2"):
        client_data(config, 3)


def write_mnist(root: Any, name: Any, images: Any, labels: Any) -> None:
    """Write one split in the format of the original files."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    header = np.array([0x0803, *images.shape], dtype=">i4").tobytes()
    (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    header = np.array([0x0801, len(labels)], dtype=">i4").tobytes()
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def test_torchvisions_mnist_is_read_from_a_local_path(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    write_mnist(tmp_path, "train", pixels, labels)
    write_mnist(tmp_path, "t10k", pixels[:10], labels[:10])
    config = federation(name="mnist", path=str(tmp_path), image_size=28)
    part = client_data(config, 2)
    assert part.images.shape == (10, 1, 28, 28)
    as_bytes = {p.tobytes() for p in pixels}
    for image in part.images:
        assert (image[0] * 255).round().byte().numpy().tobytes() in as_bytes
    test_images, test_labels = held_out(config.data)
    torch.testing.assert_close(test_images[3, 0], torch.from_numpy(pixels[3]) / 255.0)
    assert test_labels.tolist() == list(range(10))
    assert data_spec(config.data).mean == (0.1307,)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_mixed_shapes_are_fitted_as_one_by_one(channels: int) -> None:
    """In their order, whatever stands together; of 28 pixels some need no other size."""
    shapes = [(1, 28, 28)] * 4 + [(3, 28, 28), (1, 8, 9), (1, 28, 28), *[(3, 400, 310)] * 3]
    images = [torch.rand(shape) * 1.2 for shape in shapes]
    source = Source(torch.zeros(10), classes=2, channels=1, read=images.__getitem__)
    alone = [source.images([i], channels=channels, size=28) for i in range(10)]
    assert torch.equal(source.images(range(10), channels=channels, size=28), torch.cat(alone))
    assert source.images([], channels=channels, size=28).shape == (0, channels, 28, 28)
