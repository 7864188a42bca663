"""Words: what is read, what encryption changes, and the text sets by path."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from refusals import refused

from bract.config.encryption import EncryptionConfig
from bract.strategies import FedAvg, FedBoosting
from experiments.harness.crnn import CRNN, Architecture, decode, loss_of
from experiments.harness.readers import Part, Reader, Reading, Training, Words, distance
from experiments.harness.simulation import simulate
from experiments.harness.words import CHARACTERS, word_set
from experiments.papers.catalog import experiments, find
from experiments.papers.runners.base import Context
from experiments.papers.runners.text import TextRunner, TextSettings
from experiments.papers.running import plan
from experiments.papers.text_sets import TESTS, missing_text, open_text

SMALL: dict[str, Any] = {
    **{"height": 8, "width": 16, "characters": 3, "longest": 3, "channels": 2, "hidden": 4},
    **{"words": 20, "test_words": 6, "batch": 10, "optimizer": "adam", "lr": 0.002},
    **{"rounds": 1, "judged": 1, "seeds": 1},
}


def measured(**changes: Any) -> dict[str, float | None]:
    given = TextSettings.model_validate({**SMALL, **changes})
    (sample,) = TextRunner().run(given, 0, Context()).samples
    return sample.values


def scores(text: str) -> torch.Tensor:
    """Log probabilities whose best path is ``text``, blanks written as dots."""
    classes = torch.tensor([0 if c == "." else CHARACTERS.index(c) + 1 for c in text])
    return torch.nn.functional.one_hot(classes, 37).float()[:, None] * 9.0


def test_the_best_path_merges_repeats_and_drops_blanks() -> None:
    assert decode(scores("..aab..bb9")) == ["abb9"]
    assert decode(scores("....")) == [""]


def test_the_loss_of_one_frame_is_the_letters_and_of_two_sums_over_the_paths() -> None:
    even = torch.full((1, 1, 3), 1 / 3).log()
    assert float(loss_of(even, ["a"])) == pytest.approx(torch.tensor(3.0).log().item())
    # Of nine paths of two frames "aa", "a." and ".a" say a.
    assert float(loss_of(even.expand(2, 1, 3), ["a"])) == pytest.approx(
        torch.tensor(3.0).log().item()
    )


def test_edits_are_counted_as_by_hand() -> None:
    assert distance("jecoil", "ecoil") == 1
    assert distance("kitten", "sitting") == 3
    assert distance("", "abc") == 3
    found = Reading(0.0, ["abc", "ax"], ["abc", "abb"])
    assert found.accuracy == 0.5
    assert found.character_errors == pytest.approx(2 / 6)


def test_a_network_has_a_frame_for_four_columns_and_a_class_for_the_blank() -> None:
    given = Architecture(height=32, width=100, characters=36, channels=2, hidden=4)
    assert CRNN(given)(torch.rand(3, 1, 32, 100)).shape == (25, 3, 37)


def test_words_follow_from_the_seed_and_the_two_styles_differ() -> None:
    size = {"height": 16, "width": 32, "characters": 5, "longest": 3}
    one, words = word_set("clean", 4, seed=1, **size)
    again, same = word_set("clean", 4, seed=1, **size)
    other, _ = word_set("scene", 4, seed=1, **size)
    assert torch.equal(one, again)
    assert words == same
    assert {c for word in words for c in word} <= set("abcde")
    assert float(one.min()) >= 0.0 and float(one.max()) <= 1.0
    assert float(one.mean()) > 0.5 > float(other.mean())


def test_a_reader_validates_on_words_that_it_does_not_train_on() -> None:
    images, words = torch.rand(20, 1, 8, 16), [f"a{i}" for i in range(20)]
    reader = Reader(Architecture(8, 16, 36, 2, 4), Words(images, words), Training(5), seed=0)
    assert len(reader.own) == 18
    ((shown, held_out),) = reader.held_out.batches([range(2)])
    assert held_out == ["a18", "a19"]
    assert torch.equal(shown, images[18:])
    assert isinstance(reader.own, Part)


class Fixed:
    """A client whose update and scores are given."""

    def __init__(self, change: float, accuracy: float, trained: float) -> None:
        self.change, self.accuracy, self.trained = change, accuracy, trained

    def train(
        self, arrays: dict[str, torch.Tensor], server_round: int, proximal_mu: float
    ) -> tuple[dict[str, torch.Tensor], int, dict[str, float]]:
        local = {
            name: value + (self.change if value.is_floating_point() else 4)
            for name, value in arrays.items()
        }
        return local, 10, {"trained_accuracy": self.trained}

    def score(self, arrays: dict[str, torch.Tensor]) -> tuple[float, float]:
        return 1.0, self.accuracy


START = {
    "layer.weight": torch.zeros(3),
    "norm.running_mean": torch.ones(2),
    "norm.num_batches_tracked": torch.tensor(2),
}


def after_a_round(strategy: FedAvg) -> dict[str, torch.Tensor]:
    clients = [Fixed(0.3, 0.5, 0.9), Fixed(-0.1, 0.7, 0.1)]
    (row,) = simulate(strategy, clients, START, 1, lambda _: 0.0)
    arrays: dict[str, torch.Tensor] = row["arrays"]
    return arrays


@pytest.mark.parametrize(
    "options",
    [{}, {"p_hat": 1.0, "weighting": "proportional"}, {"training_scores": False}],
)
def test_a_sealed_round_is_the_plain_one_within_a_step(options: dict[str, Any]) -> None:
    from experiments.papers.sealed import SealedFedAvg, SealedFedBoosting

    encryption = EncryptionConfig(scheme="paillier", max_weight_sum=1000)
    for plain, sealed, given in (
        (FedAvg, SealedFedAvg, {"weighting": "uniform"}),
        (FedBoosting, SealedFedBoosting, options),
    ):
        wanted = after_a_round(plain(**given))
        strategy = sealed(encryption=encryption, **given)
        found = after_a_round(strategy)
        assert strategy.clipped == 0
        assert found["norm.num_batches_tracked"] == wanted["norm.num_batches_tracked"] == 6
        for name, value in wanted.items():
            # Weights are off by half of 1/1000 at most, codes by half a step.
            assert torch.allclose(found[name].double(), value.double(), atol=4e-4), name


def test_what_is_clipped_is_counted_and_cut() -> None:
    from experiments.papers.sealed import SealedFedAvg

    encryption = EncryptionConfig(scheme="paillier", clip=0.2)
    strategy = SealedFedAvg(encryption=encryption, weighting="uniform")
    found = after_a_round(strategy)
    assert strategy.clipped == 3
    # (0.2 - 0.1) / 2
    assert found["layer.weight"].tolist() == pytest.approx([0.05] * 3, abs=1e-4)


def test_a_federation_of_readers_has_the_figures_that_are_declared() -> None:
    values = measured(strategy="fedboosting", watched=(1,))
    assert {"accuracy", "accuracy_clean", "accuracy_scene", "character_errors"} <= set(values)
    assert {"accuracy@1", "weight0", "weight0@1", "diverged"} <= set(values)
    assert values["accuracy@1"] == values["accuracy"]
    assert values["weight0@1"] == values["weight0"]
    assert 0.0 <= (values["trained"] if values["trained"] is not None else -1.0) <= 1.0


def test_an_encrypted_row_says_what_was_clipped_and_a_plain_one_does_not() -> None:
    assert (measured(encrypted=True, clip=1e-4)["clipped"] or 0.0) > 100
    assert "clipped" not in measured()


def test_a_training_that_is_not_finite_counts_as_nothing_read() -> None:
    values = measured(lr=1e30, optimizer="adam", rounds=2)
    assert values["diverged"] == 1.0
    assert values["accuracy"] == 0.0


def test_the_picture_shows_words_of_every_set() -> None:
    found = TextRunner().run(TextSettings.model_validate(SMALL), 0, Context())
    assert found.pictures is not None
    image = Image.open(io.BytesIO(base64.b64decode(found.pictures)))
    assert image.size[1] == 12 * (16 + 4)


def test_rows_of_the_encryption_table_and_figure_are_the_same_measurements() -> None:
    (table,) = find(["fedboosting/table-4-3"])
    (figure,) = find(["fedboosting/figure-4-5"])
    for scale in ("laptop", "gpu"):
        for one, other in zip(table.rows, figure.rows, strict=True):
            assert table.settings_at(scale, one) == figure.settings_at(scale, other)


def text_sets(folder: Path, left_out: str = "") -> Path:
    """Twenty words in every set."""
    image = Image.new("L", (40, 20), 200)
    for name in ("synth90k", "synthtext", *TESTS):
        if name == left_out:
            continue
        home = folder / name
        (home / "1").mkdir(parents=True)
        files = [f"1/{i}_Abc{i}_7.png" for i in range(20)]
        for file in files:
            image.save(home / file)
        if name == "synth90k":
            lines = [f"./{file} {i}" for i, file in enumerate(files)]
            (home / "annotation_train.txt").write_text("\n".join(lines) + "\n")
        else:
            lines = [f"{file}\tABC{i}" for i, file in enumerate(files)]
            lines += ["1/gone.png\tto", "1/gone.png\tcan't"]
            (home / "labels.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.processes
def test_the_text_sets_are_read_by_path_and_trained_on(tmp_path: Path) -> None:
    folder = text_sets(tmp_path)
    assert missing_text(folder) is None
    for name in ("synth90k", "iiit5k"):
        found = open_text(folder, name, 8, 16)
        assert found.words[:2] == ["abc0", "abc1"]
        assert len(found) == 20
        ((images, words),) = found.batches([[3, 1]])
        assert words == ["abc3", "abc1"]
        assert images.shape == (2, 1, 8, 16)
        assert float(images.mean()) == pytest.approx(200 / 255, abs=1e-3)
    given = TextSettings.model_validate({**SMALL, "data": "scene-text"})
    (sample,) = TextRunner().run(given, 0, Context(folder=folder)).samples
    assert {f"accuracy_{name}" for name in TESTS} <= set(sample.values)


def test_a_missing_set_is_named_with_its_layout_before_anything_starts(tmp_path: Path) -> None:
    folder = text_sets(tmp_path / "data", left_out="svt")
    (table,) = find(["fedboosting/table-4-3"])
    with refused("file-missing", "svt/labels.tsv", "IMAGE<TAB>WORD") as caught:
        plan(table, "gpu", tmp_path, Context(folder=folder), estimate=False)
    assert "--scale laptop" in str(caught.value)
    assert not list(tmp_path.glob("fedboosting/*"))


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("svt", "one.png word", ("file-damaged", "labels.tsv:1", "one.png", "IMAGE<TAB>WORD")),
        ("svt", "one.png\tat", ("data-empty", "3", "25")),
        (
            "synth90k",
            "one.png 3",
            ("file-damaged", "annotation_train.txt:1", "one.png", "3", "FOLDER"),
        ),
    ],
)
def test_labels_that_are_none_name_their_file_and_line(
    name: str, line: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    file = text_sets(tmp_path) / name
    (file / ("annotation_train.txt" if name == "synth90k" else "labels.tsv")).write_text(line)
    with refused(*said):
        open_text(tmp_path, name, 8, 16)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (text_sets(tmp_path) / "svt" / "1" / "0_Abc0_7.png").write_bytes(b"no image")
    with refused("file-damaged", "0_Abc0_7.png"):
        list(open_text(tmp_path, "svt", 8, 16).batches([[0]]))


def test_experiments_on_text_are_declared_to_the_end() -> None:
    kinds = {name for name, one in experiments().items() if one.kind == "text"}
    wanted = ("table-4-2", "table-4-3", "figure-4-4-text", "figure-4-5", "figure-4-6")
    assert kinds == {f"fedboosting/{item}" for item in wanted}
