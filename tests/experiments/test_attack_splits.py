"""What chooses an attack's setting shares neither image nor network with what scores it."""

import argparse
import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

import bract
from experiments import attacks
from experiments.harness import command
from experiments.harness.images import image_set
from experiments.harness.splits import OPENED, first_seed, open_release

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
        with refused("usage", "release", "0.2.0"):
            image_set("digits", 1, name)


def opened(folder: Path, *options: str, experiment: str = "audit", split: str = RELEASE) -> None:
    line = shlex.join(["python", "-m", f"experiments.{experiment}", "--split", split, *options])
    open_release(split, experiment, line, folder, version="0.2.0")


def test_a_release_scores_once(tmp_path: Path) -> None:
    content = {"experiment": "audit", "command": f"experiments.audit --split '{RELEASE}' --json"}
    (tmp_path / "audit-2-cores.json").write_text(json.dumps(content))
    with refused("file-taken", tmp_path):
        opened(tmp_path)
    opened(tmp_path, experiment="bayes")
    opened(tmp_path, split="score")


def test_an_opening_stays_on_record_and_only_the_same_command_goes_on(tmp_path: Path) -> None:
    opened(tmp_path, "--images", "8")
    opened(tmp_path, "--images", "8")
    with refused("file-taken", OPENED, "split"):
        opened(tmp_path, "--images", "16")
    (line,) = (tmp_path / OPENED).read_text().splitlines()
    assert json.loads(line)["split"] == RELEASE


def test_a_version_that_the_code_does_not_have_opens_nothing(tmp_path: Path) -> None:
    with refused("usage", "0.2.0"):
        opened(tmp_path, split="release 0.3.0")
    assert not (tmp_path / OPENED).exists()


def run(monkeypatch: Any, folder: Path, *options: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["/somewhere/panel.py", *options])
    monkeypatch.setattr(command, "RESULTS", folder)
    monkeypatch.setattr(bract, "__version__", "0.2.0")
    return command.parse(command.parser("A panel.", "split"))


def test_a_command_opens_a_release_only_into_a_result_that_says_so(
    monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    for wrong in (["--split", RELEASE], ["--spl", RELEASE, "--json"]):
        with pytest.raises(SystemExit):
            run(monkeypatch, tmp_path, *wrong)
    assert not (tmp_path / OPENED).exists()
    assert "add --json" in capsys.readouterr().err
    run(monkeypatch, tmp_path, "--split", RELEASE, "--json")
    assert json.loads((tmp_path / OPENED).read_text())["experiment"] == "panel"
    monkeypatch.setattr(command, "digest", lambda *_: "0")
    command.emit([{"psnr": 1.0}], ["psnr"], as_json=True)
    assert json.loads(capsys.readouterr().out)["split"] == RELEASE


def test_crops_of_one_picture_share_their_source() -> None:
    assert image_set("photos", 6, "score").sources == (0, 1, 2, 3, 0, 1)
    assert image_set("digits", 3, "score").sources == (0, 1, 2)
