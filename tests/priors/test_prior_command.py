import json
from pathlib import Path

import torch
from PIL import Image
from refusals import refused
from typer.testing import CliRunner

from bract.cli.main import app
from bract.config import DataConfig
from bract.data.sources import open_source
from bract.errors import BractError
from bract_priors.public_images import public_images
from bract_priors.trained_prior import TrainedPrior


def pictures(root: Path, count: int) -> Path:
    for number in range(count):
        pixels = torch.full((20 + number, 30, 3), 10 * number, dtype=torch.uint8)
        (root / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(root / str(number % 2) / f"{number}.png")
    return root


def test_the_command_writes_a_prior_of_the_split_that_no_client_trains_on(tmp_path: Path) -> None:
    out = tmp_path / "prior.safetensors"
    line = [*("prior", "train", "--data", "digits", "--size", "16", "--epochs", "1"), "--format"]
    found = CliRunner().invoke(app, [*line, "json", "--set", "width=2", "--out", str(out)])
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert facts["source"] == "digits, test split" and facts["classes"] == 10
    prior = TrainedPrior.load(out)
    train, test = (open_source(DataConfig(name="digits"), split) for split in ("train", "test"))
    assert prior.trained_on(test.images(range(20), channels=1, size=16)).all()
    assert not prior.trained_on(train.images(range(20), channels=1, size=16)).any()
    shown = CliRunner().invoke(app, ["prior", "show", str(out), "--format", "json"])
    assert json.loads(shown.stdout) == facts
    assert "digits, test split" in CliRunner().invoke(app, ["prior", "show", str(out)]).stdout


def test_the_command_writes_a_flow(tmp_path: Path) -> None:
    out = tmp_path / "flow.safetensors"
    line = ["prior", "train", "--data", "digits", "--size", "8", "--epochs", "1", "--kind", "flow"]
    line += ["--images", "64", "--set", "width=2", "--out", str(out)]
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 0, found.output
    facts = TrainedPrior.load(out).facts
    assert (facts.generator, facts.latent, facts.images, facts.classes) == ("flow", 64, 64, 10)
    shown = CliRunner().invoke(app, ["prior", "show", str(out), "--format", "json"])
    assert json.loads(shown.stdout)["kind"] == "flow"
    refused = CliRunner().invoke(app, [*line, "--set", "latent=4"])
    assert isinstance(refused.exception, BractError) and "latent" in str(refused.exception)


def test_pictures_of_a_folder_are_taken_as_they_lie_and_cut_at_random(tmp_path: Path) -> None:
    root = pictures(tmp_path / "holidays", 5)
    whole = public_images(str(root), size=8)
    assert whole.images.shape == (5, 3, 8, 8) and whole.labels is None
    assert whole.source == "pictures below holidays"
    # Sorted by path: 0/0, 0/2, 0/4, 1/1, 1/3.
    assert (whole.images.mean(dim=(1, 2, 3)) * 255).round().tolist() == [0, 20, 40, 10, 30]
    assert public_images(str(root), size=8, channels=1, crops=3, most=2).images.shape[0] == 6


def test_colour_pictures_of_a_folder_make_a_prior_that_knows_them(tmp_path: Path) -> None:
    root, out = pictures(tmp_path / "photos", 5), tmp_path / "prior.safetensors"
    line = ["prior", "train", "--data", str(root), "--crops", "4", "--size", "32"]
    line += ["--epochs", "1", "--set", "width=2", "--out", str(out)]
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 0, found.output
    prior = TrainedPrior.load(out)
    assert prior.facts.image_shape == (3, 32, 32)
    assert prior.facts.images == 20 and prior.facts.classes == 0
    assert prior.sample([0, 0], seed=1).shape == (2, 3, 32, 32)
    taken = public_images(str(root), size=32, crops=4)
    assert prior.trained_on(taken.images).all()
    assert not prior.trained_on(1.0 - taken.images[:1]).any()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    with refused("file-missing", "nowhere", "digits"):
        public_images("nowhere")
    with refused("data-empty", tmp_path):
        public_images(str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"no picture")
    with refused("file-unreadable", "a.png"):
        public_images(str(tmp_path))
    with refused("usage", "--crops"):
        public_images("digits", crops=2)
    for setting in ("channels=2", "channel=1", "width=0", "labels=some", "seed"):
        found = CliRunner().invoke(app, ["prior", "train", "--data", "digits", "--set", setting])
        assert isinstance(found.exception, BractError)
        assert setting.partition("=")[0] in str(found.exception)
    assert isinstance(found.exception, BractError)
