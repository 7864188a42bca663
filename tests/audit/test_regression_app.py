"""Apps whose targets are numbers: images are kept with them, described and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from audited import attacked_run
from refusals import refused
from safetensors.torch import load_file, save_file
from test_signal_app import checked, described, kept, run, written
from torch import Tensor, nn

from bract.inputs import INPUTS
from bract.report import write_report
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
    assert scored.target_error == 0.0
    rows = targets + 0.01
    scorer = scorer_of(INPUTS["image"](), None)
    off = scorer.score(truth.images[:2], truth, recovered=rows[:2]).target_error
    assert off == pytest.approx(0.01, abs=1e-5)
    whole = scorer.score(truth.images, truth, recovered=rows.flip(0)).target_error
    assert whole == pytest.approx(0.01, abs=1e-5)
    assert scorer.score(truth.images, truth).target_error is None
    assert [row.psnr for row in scored.rows] == [pytest.approx(100.0)] * 4


def test_several_labels_an_image_are_kept_and_named(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    captures = run(tmp_path, of_three, IMAGES, rows)
    file = next((tmp_path / "truth").rglob("*.safetensors"))
    assert torch.equal(load_file(file)["labels"], rows)
    with refused("model-unsuited", "several labels an example are not audited"):
        described(captures, tmp_path)


def test_other_numbers_than_outputs_are_refused(tmp_path: Path) -> None:
    captures = run(tmp_path, of_one, IMAGES, AGES)
    file = next((tmp_path / "truth").rglob("*.safetensors"))
    save_file(load_file(file) | {"labels": POINTS}, file)
    with refused("model-unsuited", "1 output,", "3 numbers an image as its target"):
        described(captures, tmp_path)


def test_the_page_says_how_far_targets_are_off_beside_the_mean_of_others(tmp_path: Path) -> None:
    others = torch.tensor([[21.0], [41.0], [51.0], [31.0]])
    run(tmp_path, of_one, 1 - IMAGES, others, client=2)
    captures = run(tmp_path, of_one, IMAGES[:1], AGES[1:2])
    found = checked(captures, tmp_path)
    written(found, tmp_path)
    asked: dict[str, Any] = {"device": "cpu", "models": ["test_regression_app:of_one"]}
    found_by = attacked_run(tmp_path, attacks=["ig"], truth=tmp_path / "truth" / "7", **asked)
    (result,) = (one for one in found_by if one.client == "node-1")
    assert result.label_accuracy is None
    assert result.target_baseline == pytest.approx(5.0)
    assert result.target_error == pytest.approx(0.0, abs=0.1)
    page = write_report(tmp_path)
    shown = [page.read_text(), page.with_name("summary.html").read_text()]
    assert all("off by" in text for text in shown)
