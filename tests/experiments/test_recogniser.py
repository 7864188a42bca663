"""The recogniser: trained on the data set's own classes, and right about easy images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from bract.models.initialise import initialise
from bract_papers.models.vggface import VGGFace
from experiments.harness.images import held_out_images
from experiments.papers.catalog import find
from experiments.papers.recogniser import Recogniser, _he, named
from experiments.papers.runners.base import Context
from experiments.papers.runners.reconstruction import ReconstructionRunner, ReconstructionSettings

PEOPLE = 4


@pytest.fixture
def people(tmp_path: Path) -> Path:
    for split, images in (("train", 30), ("test", 30)):
        for person in range(PEOPLE):
            place = tmp_path / "vggface" / split / f"person{person}"
            place.mkdir(parents=True)
            for number in range(images):
                shade = (80 * person, 255 - 80 * person, number)
                Image.new("RGB", (40, 40), shade).save(place / f"{number}.png")
    return tmp_path


def test_people_are_told_apart_by_colour(people: Path) -> None:
    shown = torch.stack(
        [
            torch.tensor([80.0 * p, 255.0 - 80.0 * p, 7.0])[:, None, None].expand(3, 32, 32) / 255
            for p in range(PEOPLE)
        ]
    )
    recogniser = Recogniser(model="mlp", activation="relu", lr=1e-3, steps=150, batch=32)
    found = named(recogniser, shown, data="vggface", classes=PEOPLE, folder=people)
    assert [order[0] for order in found] == list(range(PEOPLE))
    assert all(sorted(order) == list(range(PEOPLE)) for order in found)


def test_digits_are_named_above_chance() -> None:
    images, labels = held_out_images("digits")
    recogniser = Recogniser(model="lenet-strided-bn", steps=60)
    found = named(recogniser, images[:50], data="digits", classes=10, folder=Path("nowhere"))
    right = sum(order[0] == label for order, label in zip(found, labels[:50].tolist(), strict=True))
    assert right >= 25


@pytest.mark.parametrize("model", ["lenet", {"model": "lenet", "activation": "relu", "steps": 2}])
def test_a_row_on_faces_has_as_many_names_as_there_are_people(
    people: Path, model: str | dict[str, object]
) -> None:
    given = ReconstructionSettings.model_validate(
        {"data": "vggface", "model": "lenet", "attack": "class mean", "uploads": 4, "batch": 1,
         "recogniser": model}
    )  # fmt: skip
    if isinstance(model, str):
        assert given.recogniser == Recogniser(model=model)
        given = given.model_copy(update={"recogniser": Recogniser(model=model, steps=2)})
    samples = ReconstructionRunner().run(given, 0, Context(folder=people)).samples
    assert len(samples) == 4
    # Of four people the right one is always among five.
    assert {sample.values["reidentified5"] for sample in samples} == {1.0}


def test_a_recogniser_without_steps_is_refused() -> None:
    with pytest.raises(ValidationError):
        Recogniser(model="lenet", steps=0)


def test_the_faces_of_the_thesis_are_attacked_at_full_size() -> None:
    (table,) = find(["grnn/table-3-15"])
    used: dict[str, list[str]] = {}
    for row in table.rows_at("gpu"):
        settings = ReconstructionSettings.model_validate(table.settings_at("gpu", row))
        assert settings.data == "vggface"
        assert settings.recogniser is not None
        used.setdefault(settings.recogniser.model, []).append(row.name)
    assert set(used) == {"resnet18", "densenet121", "vggface"}
    assert len(used["resnet18"]) == 7
    assert all("data" not in table.settings_at("laptop", row) or
               table.settings_at("laptop", row)["data"] == "mnist"
               for row in table.rows_at("laptop"))  # fmt: skip
    assert len(table.rows_at("laptop")) == 7


def test_deep_layers_of_relu_tell_images_apart_before_training() -> None:
    model = VGGFace(classes=10, channels=1, image_size=32, activation="relu", width=32).eval()
    images = torch.rand(6, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    apart = []
    for draw in (lambda: initialise(model, "default", 1), lambda: _he(model)):
        draw()
        with torch.no_grad():
            logits = model(images)
        apart.append(float(logits.std(0).mean() / logits.abs().mean()))
    assert apart[1] > 10 * apart[0]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert not any(bias.any() for bias in biases)
