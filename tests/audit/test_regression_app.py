"""Apps whose targets are numbers: images are kept with them, described and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_signal_app import checked, described, kept, run
from torch import Tensor, nn

from bract.inputs import INPUTS
from bract.scores import scorer_of


def _network(outputs: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, outputs), nn.Flatten()
    )


def of_one() -> nn.Module:
    return _network(1)


def of_three() -> nn.Module:
    return _network(3)


IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
AGES = torch.tensor([[3.0], [41.0], [-1.0], [7.5]])
POINTS = torch.rand(4, 3, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("make", "targets"), [(of_one, AGES), (of_three, POINTS)])
def test_images_with_numbers_as_targets_are_kept_described_and_confirmed(
    make: object, targets: Tensor, tmp_path: Path
) -> None:
    captures = run(tmp_path, make, IMAGES, targets)
    found = checked(captures, tmp_path)
    assert found.is_confirmed and found.description.loss == "mse"
    truth = kept(captures, found, tmp_path)
    assert torch.equal(truth.labels, targets.squeeze(1))
    scored = scorer_of(INPUTS["image"](), None).score(truth.images, truth, recovered=truth.labels)
    assert scored.labels == [0] * 4 and scored.label_accuracy is None
    assert [row.psnr for row in scored.rows] == [pytest.approx(100.0)] * 4


def test_other_numbers_than_outputs_are_refused(tmp_path: Path) -> None:
    captures = run(tmp_path, of_one, IMAGES, AGES)
    file = next((tmp_path / "truth").rglob("*.safetensors"))
    save_file(load_file(file) | {"labels": POINTS}, file)
    with refused("model-unsuited", "1 output,", "3 numbers an image as its target"):
        described(captures, tmp_path)
