"""What a stranger's client keeps of its training, and that nothing else changes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from witnessed import context

from bract.client import keep, witness

IMAGES = torch.linspace(-1, 1, 10 * 4).reshape(10, 1, 2, 2)
LABELS = torch.arange(10)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(IMAGES, LABELS), 4, shuffle=True, generator=generator)


def test_the_batches_are_the_same_and_the_inputs_are_kept(message: Message, tmp_path: Path) -> None:
    plain = [[part.tolist() for part in batch] for batch in loader()]
    kept = keep(loader(), message, context(), folder=tmp_path / "truth")
    assert len(kept) == 3 and len(kept.dataset) == 10 and kept.batch_size == 4
    assert [[part.tolist() for part in batch] for batch in kept] == plain
    list(kept)  # a second epoch adds nothing
    path = tmp_path / "truth" / "1" / "node-7" / "round-0002.safetensors"
    found = load_file(path)
    assert found["labels"].tolist() == [label for _, labels in plain for label in labels]
    assert torch.equal(found["inputs"], IMAGES[found["labels"]])
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0


def test_a_pass_that_ends_early_keeps_what_was_used(message: Message, tmp_path: Path) -> None:
    kept = keep(loader(), message, context(**{"truth-dir": str(tmp_path)}))
    for _ in kept:
        break
    (path,) = tmp_path.rglob("*.safetensors")
    assert len(load_file(path)["labels"]) == 4


def test_dictionaries_of_tensors_are_batches_too(message: Message, tmp_path: Path) -> None:
    batches = [{"img": IMAGES[:3].half(), "label": LABELS[:3].int(), "name": ["a", "b", "c"]}]
    assert list(keep(batches, message, context(), tmp_path)) == batches
    (path,) = tmp_path.rglob("*.safetensors")
    found = load_file(path)
    assert found["inputs"].dtype == torch.float32 and found["labels"].dtype == torch.int64


def test_without_a_folder_nothing_is_kept(
    message: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = loader()
    assert keep(plain, message, context()) is plain
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batches", [[torch.zeros(3, 4)], [(IMAGES, LABELS[:2])], [(LABELS,)], [5]])
def test_other_batches_train_on_and_are_not_kept(
    message: Message, tmp_path: Path, batches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(keep(batches, message, context(), tmp_path)) == batches
    assert list(tmp_path.iterdir()) == [] and "nothing is kept" in caplog.text


def test_that_nothing_is_kept_is_logged_once_a_run(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = context()
    for _ in range(3):
        list(keep([5], message, mine, tmp_path))
    pixels = torch.zeros(2, 16, 16, 3, dtype=torch.uint8), torch.zeros(2)
    list(keep([pixels], message, context(), tmp_path))
    assert "uint8 2x16x16x3" in caplog.text and "bract.client.witness" in caplog.text
    assert caplog.text.count("nothing is kept") == 2
    assert "an audit handles PyTorch models of these inputs: image" in caplog.text


def test_a_full_disk_does_not_stop_training(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1").write_text("in the way")
    assert len(list(keep(loader(), message, context(), tmp_path))) == 3
    assert "not kept to score an audit" in caplog.text


def test_a_data_set_is_read_by_index_and_nothing_is_kept_of_it(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `transformers.Trainer` reads one; the training goes on, and a line says what to do."""
    data: Any = TensorDataset(IMAGES, LABELS)
    kept = keep(data, message, context(), tmp_path)
    found = [part.tolist() for batch in DataLoader(kept, 4) for part in batch]
    assert found == [part.tolist() for batch in DataLoader(data, 4) for part in batch]
    assert kept[3][1] == 3 and copy.copy(kept)[3][1] == 3
    assert caplog.text.count("bract.client.witness") == 1
    assert not list(tmp_path.rglob("*.safetensors"))


ROWS = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1]])
"""Several labels an image, of which the first two look like one class each."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_several_labels_an_image_are_kept(
    dtype: torch.dtype, size: int, message: Message, tmp_path: Path
) -> None:
    data = TensorDataset(IMAGES[:6], ROWS.to(dtype))
    list(keep(DataLoader(data, size), message, context(), folder=tmp_path / "kept"))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with witness(net, message, context(), tmp_path / "seen"):
        for x, y in DataLoader(data, size):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y.float())
            loss.backward()
            optimizer.step()
    for folder in ("kept", "seen"):
        (path,) = (tmp_path / folder).rglob("*.safetensors")
        held = load_file(path)
        assert torch.equal(held["labels"], ROWS.float()) and len(held["inputs"]) == 6
