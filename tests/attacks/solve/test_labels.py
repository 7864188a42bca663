from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bract.attacks import Budget
from bract.attacks.methods.label_inference import LabelInference
from bract.attacks.problem.case import open_case
from bract.attacks.solve import label_sequences
from bract.attacks.solve import labels as labels_module
from bract.attacks.solve.expectation import class_gradients
from bract.attacks.solve.labels import infer_labels
from bract.models import MODELS


def case(seen: Any, images: Any = 8) -> Any:
    return open_case(seen, tier="oblivious", max_images=images, unroll=16)


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
@pytest.mark.parametrize("init", ["default", "uniform"])
def test_a_single_label_is_read_exactly(observe: Any, digits: Any, model: Any, init: Any) -> None:
    for i in range(10):
        seen = observe(digits[0][i : i + 1], digits[1][i : i + 1], model=model, init=init)
        guess = infer_labels(case(seen))
        assert guess.exact
        assert guess.labels.tolist() == digits[1][i : i + 1].tolist()


def test_a_sign_preserving_defense_keeps_the_label(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    signs = {name: value.sign() * 1e-3 for name, value in seen.update.items()}
    masked = type(seen)(1, "c", seen.parameters, signs, seen.declaration)
    assert infer_labels(case(masked)).labels.tolist() == digits[1][:1].tolist()


def test_noise_that_hides_the_signs_leaves_the_label_to_the_nearest_class(
    observe: Any, digits: Any
) -> None:
    for i in range(6):
        seen = observe(digits[0][i : i + 1], digits[1][i : i + 1], client=f"c{i}")
        norm = float(torch.cat([v.flatten() for v in seen.update.values()]).norm())
        generator = torch.Generator().manual_seed(i)
        noisy = {
            n: v + 0.1 * norm * torch.randn(v.shape, generator=generator)
            for n, v in seen.update.items()
        }
        guess = infer_labels(case(replace(seen, update=noisy)))
        assert not guess.exact
        assert guess.labels.tolist() == digits[1][i : i + 1].tolist()


def test_the_nearest_class_differentiates_the_last_layer_alone(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, cpu = observe(digits[0][:1], digits[1][:1]), torch.device("cpu")
    hidden = replace(seen, update={n: -v for n, v in seen.update.items()})
    made: list[dict[str, torch.Tensor]] = []

    def noted(*given: Any, **settings: Any) -> Any:
        made.extend(class_gradients(*given, **settings))
        return made

    monkeypatch.setattr(labels_module, "class_gradients", noted)
    infer_labels(case(hidden))
    whole = class_gradients(hidden, case(hidden).target_model, cpu)
    assert len(made) == len(whole)
    for own, every in zip(made, whole, strict=True):
        assert own.keys() < every.keys() and len(own) == 2
        assert all(torch.equal(value, every[name]) for name, value in own.items())


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
def test_counts_of_a_batch_with_repeats_are_recovered(
    observe: Any, digits: Any, model: Any
) -> None:
    seen = observe(digits[0][:8], torch.tensor([3, 3, 3, 1, 1, 9, 0, 0]), model=model)
    guess = infer_labels(case(seen))
    assert guess.labels.tolist() == [0, 0, 1, 1, 3, 3, 3, 9]
    assert float(guess.counts.sum()) == pytest.approx(8, rel=1e-2)


TERMS: list[dict[str, Any]] = [
    {"label_smoothing": 0.3},
    {"class_weights": (1.0, 3.0, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)},
]


@pytest.mark.parametrize("terms", TERMS, ids=["smoothed", "weighted"])
def test_counts_of_a_batch_are_recovered_under_terms_of_the_loss(
    observe: Any, digits: Any, terms: dict[str, Any]
) -> None:
    images, wanted = digits[0][:8], torch.tensor([3, 3, 3, 1, 1, 9, 0, 0])
    seen = observe(images, wanted, model="lenet")
    target = case(seen).target_model
    model = target.model
    model.load_state_dict(seen.parameters)
    weights = terms.get("class_weights")
    loss = nn.CrossEntropyLoss(
        weight=None if weights is None else torch.tensor(weights),
        label_smoothing=terms.get("label_smoothing", 0.0),
    )
    loss(model(target.normalise(images)), wanted).backward()
    update = {n: v.grad for n, v in model.named_parameters() if v.grad is not None}
    declared = replace(seen.declaration, algorithm="fedsgd", **terms)
    sent: Any = replace(seen, update=update, declaration=declared)
    plain = replace(declared, label_smoothing=0.0, class_weights=None)
    counts = torch.bincount(wanted, minlength=10)
    found, without = (
        float((infer_labels(case(one)).counts - counts).abs().sum())
        for one in (sent, replace(sent, declaration=plain))
    )
    assert found < 0.6 < 1.5 < without


@pytest.mark.parametrize("steps", [4, 8, 40])
def test_counts_are_read_off_the_steps_of_adam(observe: Any, digits: Any, steps: int) -> None:
    wanted = torch.tensor([3, 3, 3, 1, 1, 9, 0, 0])
    seen = observe(
        *(digits[0][:8], wanted),
        **{"model": "lenet", "steps": steps, "batch_size": 2, "lr": 0.001, "optimizer": "adam"},
    )
    unknown = replace(seen, declaration=seen.declaration.updated({"optimizer": "unknown"}))

    def right(observation: Any) -> int:
        found = infer_labels(case(observation)).labels
        counts = [torch.bincount(labels, minlength=10) for labels in (found, wanted)]
        return int(torch.minimum(*counts).sum())

    assert right(seen) >= 7
    assert right(seen) > right(unknown)


def test_counts_survive_several_local_steps(observe: Any, digits: Any) -> None:
    labels = torch.tensor([3, 3, 3, 1, 1, 9, 0, 0])
    seen = observe(digits[0][:8], labels, steps=4, batch_size=2, lr=0.01)
    assert infer_labels(case(seen)).labels.sort().values.tolist() == sorted(labels.tolist())


@pytest.mark.parametrize(
    "steps",
    [
        {"lr": 0.01},
        {"lr": 0.002, "momentum": 0.9},
        {"lr": 0.01, "weight_decay": 0.5},
        {"lr": 0.01, "proximal_mu": 5.0},
    ],
)
def test_counts_are_read_off_long_training_whatever_else_moves_it(
    observe: Any, digits: Any, steps: dict[str, float]
) -> None:
    right = 0
    for start in (0, 20):
        images, labels = digits[0][start : start + 20], digits[1][start : start + 20]
        seen = observe(images, labels, model="lenet-strided", steps=40, batch_size=4, **steps)
        found = torch.bincount(infer_labels(case(seen, 20)).labels, minlength=10)
        right += int(torch.minimum(found, torch.bincount(labels, minlength=10)).sum())
    assert right >= 35


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
@pytest.mark.parametrize("lr", [0.02, 0.1])
def test_the_order_of_labels_over_local_steps_is_among_the_first_choices(
    observe: Any, digits: Any, model: Any, lr: Any
) -> None:
    labels = torch.tensor([3, 3, 1, 9])
    seen = observe(digits[0][:4], labels, model=model, steps=4, batch_size=1, lr=lr)
    choices = [infer_labels(case(seen), choice=i).labels.tolist() for i in range(12)]
    assert labels.tolist() in choices
    if lr == 0.02:
        assert sorted(choices[0]) == sorted(labels.tolist())


def test_the_attack_returns_labels_and_no_image(observe: Any, digits: Any) -> None:
    found = LabelInference()(observe(digits[0][:1], digits[1][:1]), budget=Budget())
    assert found.labels.tolist() == digits[1][:1].tolist()
    assert found.images.unique().tolist() == [0.5]


@pytest.mark.parametrize("steps", [None, 20])
def test_counts_without_a_bias_leave_no_class_out(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch, steps: Any
) -> None:
    """Of twenty classes with two images each, the softmax of the others hides the rarer ones."""
    images, labels = digits[0][:40], torch.arange(40) % 20
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 12, 5, 2, 2), nn.ReLU(), nn.Flatten()]
    network = nn.Sequential(*body, nn.Linear(192, 20, bias=False))
    monkeypatch.setitem(MODELS._entries, "test-unbiased", lambda **_: network)
    settings: Any = {} if steps is None else {"steps": steps, "batch_size": 10, "lr": 0.005}
    seen = observe(images, labels, model=network, name="test-unbiased", classes=20, **settings)
    found = infer_labels(case(seen, 40))
    counts = torch.bincount(found.labels, minlength=20)
    assert int(torch.minimum(counts, torch.full_like(counts, 2)).sum()) >= 38
    assert found.source == "weight"


def test_neighbouring_sequences_are_compared_part_by_part(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observe(digits[0][:6], digits[1][:6], steps=4, batch_size=3, lr=0.1)
    whole = infer_labels(case(seen), choice=2).labels
    monkeypatch.setattr(label_sequences, "_AT_ONCE", 30)
    assert torch.equal(infer_labels(case(seen), choice=2).labels, whole)


def test_shares_of_a_batch_are_those_of_one_hot_rows() -> None:
    labels = torch.randint(5, (7, 4))
    rows = nn.functional.one_hot(labels, 5).double().mean(dim=1)
    assert torch.allclose(label_sequences._shares(labels, torch.zeros(5).double()), rows)


def test_turns_in_a_smaller_batch_are_read_where_steps_count_alike(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(labels_module, "uneven_counts", lambda *a: asked.append(1))
    steps: dict[str, Any] = {"steps": 20, "batch_size": 8, "lr": 1e-3}
    for more in ({}, {"weight_decay": 1e-4}, {"momentum": 0.9}, {"weight_decay": 50.0}):
        asked.clear()
        infer_labels(case(observe(digits[0][:9], digits[1][:9], **steps, **more), 9))
        assert bool(asked) == (more.get("momentum") is None and more.get("weight_decay", 0) < 1)
