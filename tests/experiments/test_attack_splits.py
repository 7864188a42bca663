"""What chooses an attack's setting shares neither image nor network with what scores it."""

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
