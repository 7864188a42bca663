"""What chooses an attack's setting shares neither image nor network with what scores it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import attacks
from experiments.harness.images import image_set


@pytest.mark.parametrize("init", ["default", "uniform"])
@pytest.mark.parametrize("data", ["digits", "photos"])
def test_choosing_and_scoring_share_no_image_and_no_network(init: Any, data: Any) -> None:
    setting = attacks.Setting("ig", "lenet-strided", init, data, 1)
    found = {}
    for split in ("score", "choose"):
        images = image_set(data, 4, split)
        (seen, truth, _), *_ = attacks.observations_of(images, setting, split)
        found[split] = (seen, torch.cat([images.images, images.candidates]), truth)
    (scored, seen_there, truth), (chosen, seen_here, _) = found["score"], found["choose"]
    for name, value in scored.parameters.items():
        assert not torch.equal(value, chosen.parameters[name])
    here = seen_here.flatten(1)
    assert torch.equal(truth[0], seen_there[0])
    assert float(torch.cdist(seen_there.flatten(1), here).min()) > 1e-3


def test_rows_of_other_code_or_another_torch_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    scores = {"psnr": 1.0, "ssim": 1.0, "seconds_per_image": 1.0}

    def run(setting: Any, options: Any) -> Any:
        calls.append(setting)
        return {**vars(setting), **scores}

    monkeypatch.setattr(attacks, "run", run)
    monkeypatch.setattr(attacks, "emit", lambda *arguments, **settings: None)
    command = "attacks --attack ig --model lenet-strided --init default --data digits --no-speed"
    words = [*command.split(), "--no-baselines", "--resume", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", words)
    for code, measured in (("one", 1), ("one", 1), ("other", 2), ("other", 2)):
        monkeypatch.setattr(attacks, "source_digest", lambda code=code: code)
        attacks.main()
        assert len(calls) == measured
