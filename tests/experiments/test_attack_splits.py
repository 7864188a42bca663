"""What chooses an attack's setting shares neither image nor network with what scores it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bract.errors import BractError
from experiments import attacks
from experiments.harness.images import image_set
from experiments.harness.splits import first_seed, refuse_reopened

RELEASE = "release 0.2.0"


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


@pytest.mark.parametrize("data", ["digits", "faces", "grey", "photos"])
def test_no_two_splits_attack_one_image(data: str) -> None:
    found = [image_set(data, 8, split).images.flatten(1) for split in ("score", "choose", RELEASE)]
    for one, other in itertools.combinations(found, 2):
        if one.shape == other.shape:
            assert float(torch.cdist(one, other).min()) > 1e-3
    seeds = {first_seed(split) for split in ("score", "choose", RELEASE)}
    assert len(seeds) == 3


def test_the_split_of_a_release_names_the_version_that_opens_it() -> None:
    for name in ("release", "release soon", "test"):
        with pytest.raises(BractError, match=r"release 0\.2\.0"):
            image_set("digits", 1, name)


def test_a_release_scores_once(tmp_path: Path) -> None:
    refuse_reopened(RELEASE, "audit", tmp_path)
    command = f"python -m experiments.audit --split '{RELEASE}' --json"
    content = {"experiment": "audit", "command": command}
    (tmp_path / "audit-2-cores.json").write_text(json.dumps(content))
    with pytest.raises(BractError, match="opened once"):
        refuse_reopened(RELEASE, "audit", tmp_path)
    refuse_reopened(RELEASE, "bayes", tmp_path)
    refuse_reopened("release 0.3.0", "audit", tmp_path)
    refuse_reopened("score", "audit", tmp_path)


def test_crops_of_one_picture_share_their_source() -> None:
    assert image_set("photos", 6, "score").sources == (0, 1, 2, 3, 0, 1)
    assert image_set("digits", 3, "score").sources == (0, 1, 2)
