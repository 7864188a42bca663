"""bract.yaml: what it may say, what it makes of a capture's declaration, and its errors."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.config.config import TrainingConfig
from bract.config.work import LocalWork
from bract.errors import BractError
from bract.schema import ClientDeclaration
from bract.schema.described_work import DescribedWork, planned_steps
from bract.schema.description_text import (
    build_description,
    dump_description,
    parse_description,
    read_description,
)

WHOLE = """
model: my_app.task:Net
input:
  shape: [3, 32, 32]
  mean: [0.5]
  std: [0.25]
classes: 10
buffers: [scale]
training:
  optimizer: sgd
  lr: 0.01  # guessed
  momentum: 0.9
  batch_size: 8
  local_epochs: 2
clients:
  node-1:
    local_steps: 3
    batch_size: 4
defenses: [fedkl]
data: {name: digits}
guessed:
  training.lr: the size of the updates
"""


def test_a_description_is_laid_over_what_a_capture_declares() -> None:
    described = parse_description(WHOLE)
    declared = ClientDeclaration(num_examples=20, lr=0.5, norm_mode="eval")
    found = described.declare(declared, "node-2")
    assert (found.model, found.image_shape, found.classes) == ("my_app.task:Net", (3, 32, 32), 10)
    assert (found.mean, found.std) == ((0.5,) * 3, (0.25,) * 3)
    assert (found.lr, found.momentum, found.batch_size) == (0.01, 0.9, 8)
    assert found.local_steps == 6  # two passes over 20 images in batches of 8, 8 and 4
    assert found.num_examples == 20 and found.norm_mode == "eval"
    assert found.defenses == ({"name": "fedkl"},)


def test_a_clients_own_section_comes_before_that_of_all() -> None:
    found = parse_description(WHOLE).declare(ClientDeclaration(num_examples=2), "node-1")
    assert (found.local_steps, found.batch_size, found.lr) == (3, 2, 0.01)


def test_what_a_description_leaves_out_stays_as_the_capture_declares_it() -> None:
    declared = ClientDeclaration(model="lenet", lr=0.1, local_steps=2, batch_size=4, momentum=0.5)
    assert parse_description("").declare(declared, "a") == declared


def test_attacks_get_the_mean_rate_of_a_schedule_within_a_round() -> None:
    described = parse_description("training: {lr_factors: [1, 0.5, 0]}")
    found = described.declare(ClientDeclaration(lr=0.2), "a")
    assert found.lr == pytest.approx(0.1)
    assert found.lr_factors == pytest.approx((2.0, 1.0, 0.0))
    with refused("config-value", "lr_factors"):
        parse_description("training: {lr_factors: [0, 0]}")


def test_what_a_client_adds_to_its_loss_and_steps_is_declared() -> None:
    terms = "{label_smoothing: 0.1, class_weights: [1, 2], max_grad_norm: 1, betas: [0.5, 0.9]}"
    found = parse_description(f"training: {terms}").declare(ClientDeclaration(), "a")
    assert (found.label_smoothing, found.class_weights) == (0.1, (1.0, 2.0))
    assert (found.max_grad_norm, found.betas) == (1.0, (0.5, 0.9))


def test_a_description_reads_back_as_it_was_written_with_its_guesses_marked() -> None:
    described = parse_description(WHOLE)
    text = dump_description(described)
    assert parse_description(text) == described
    assert "lr: 0.01  # guessed" in text and "momentum: 0.9\n" in text


@pytest.mark.parametrize(("last", "steps"), [(False, 3), (True, 2)])
def test_steps_follow_from_examples_batches_and_epochs(last: Any, steps: int) -> None:
    assert planned_steps(20, 8, 1, drop_last=last) == steps
    assert planned_steps(3, 8, 2, drop_last=last) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"modle": "a"}, "unknown key 'modle'. Did you mean 'model'?"),
        ({"training": {"lrr": 1}}, "unknown key 'training.lrr'. Did you mean 'training.lr'?"),
        ({"clients": {"a": {"steps": 2}}}, "Did you mean 'clients.a.local_steps'?"),
        ({"training": {"lr": -1}}, "training.lr: found -1; Input should be greater than 0"),
        ({"training": {"local_steps": 1, "local_epochs": 1}}, "give one of them"),
        ({"input": {"mean": [0.5]}}, "input.mean is given and input.std is not"),
        ({"input": {"shape": [3, 8, 8], "mean": [1, 2], "std": [1, 2]}}, "for 3 channels"),
        ({"guessed": {"classes": "why"}}, "guessed names 'classes', which has no value here"),
        ({"model": "my app:Net"}, "expected package.module:callable"),
        ({"classes": "ten"}, "classes: found 'ten'"),
        ({"clients": {"../x": {}}}, "is not allowed"),
        ({"defenses": [3]}, "defenses.0: found 3"),
    ],
)
def test_a_wrong_description_gives_one_error_that_names_the_key(content: Any, said: str) -> None:
    with pytest.raises(BractError) as caught:
        build_description(content)
    assert said in str(caught.value)
    assert str(caught.value).startswith("bract.yaml: ") and "\n" not in str(caught.value)


def test_the_file_is_named_where_it_cannot_be_read(tmp_path: Path) -> None:
    assert read_description(tmp_path) is None
    path = tmp_path / "bract.yaml"
    for text, said in (
        ("- 1", "found a list"),
        ("a: [", "not valid YAML"),
        ("b: 1\nb: 2", "twice"),
    ):
        path.write_text(text)
        with pytest.raises(BractError, match=said) as caught:
            read_description(tmp_path)
        assert str(caught.value).startswith(str(path))


def test_a_schedule_gives_every_capture_the_rate_of_its_round() -> None:
    described = build_description(
        {
            "training": {
                "lr": 0.8,
                "lr_schedule": {"kind": "cosine", "floor": 0.2, "rounds": 4},
                "augmentation": ["horizontal-flip", "color-jitter"],
                "dropout": 0.25,
            }
        }
    )
    found = [described.declare(ClientDeclaration(), "node-1", r) for r in (1, 3, 9)]
    assert [d.lr for d in found] == pytest.approx([0.8, 0.5, 0.2])
    assert found[0].augmentation == ("horizontal-flip", "color-jitter")
    assert found[0].dropout == 0.25
    assert parse_description(dump_description(described)) == described


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"lr_schedule": "step"}, ("config-value", "1")),
        ({"lr": 0.1, "lr_schedule": "cosine"}, ("config-value", "lr_schedule")),
        ({"lr": 0.1, "lr_schedule": {"kind": "stp"}}, ("config-value", "step")),
        ({"dropout": 1.0}, ("config-value", "1")),
    ],
)
def test_what_a_description_cannot_mean_is_refused(training: Any, words: tuple[str, ...]) -> None:
    with refused(*words):
        build_description({"training": training})


def test_configuration_description_and_declaration_share_one_vocabulary() -> None:
    work = set(LocalWork.model_fields)
    assert work <= set(TrainingConfig.model_fields) and work <= set(DescribedWork.model_fields)
    declared = {f.name for f in fields(ClientDeclaration)}
    assert set(LocalWork(lr=0.1).declared(1)) <= declared


def test_declared_rate_is_that_of_the_round() -> None:
    work = LocalWork.model_validate(
        {"lr": 0.8, "lr_schedule": {"kind": "step", "factor": 0.5, "every": 2}}
    )
    assert [work.declared(r)["lr"] for r in (1, 2, 3, 5)] == [0.8, 0.8, 0.4, 0.2]


def test_a_schema_of_many_columns_is_written_whole() -> None:
    columns = [
        {"name": f"c{i}: x", "kind": "categorical", "categories": [f"a{j}" for j in range(60)]}
        for i in range(80)
    ]
    target = {"name": "t", "categories": ["<=50K", ">50K"]}
    given = build_description({"input": {"table": {"columns": columns, "target": target}}})
    assert parse_description(dump_description(given)) == given
