"""The check of a description on what a client kept: right ones, wrong ones, and what explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from foreign_models import dropping, named, relu_mlp
from observing import Made, observed, own_loop, sgd, tiny  # noqa: F401
from test_truth_check import client, declared, opened
from torch import Tensor
from torch.nn import functional as F

from bract.attacks.task import AttackTask
from bract.audit.description.check import check_case, check_upload
from bract.inputs import Truth


def check(made: Made) -> Any:
    seen, images, labels = made
    return check_case(opened(seen), images, labels, thorough=True)[0]


WEIGHTS = torch.tensor([10.0, 0.1, 5, 0.2, 1, 3, 0.5, 8, 0.05, 2])

OTHERS: dict[str, tuple[Callable[[], Made], str]] = {
    "momentum": (lambda: own_loop(sgd(momentum=0.9)), "momentum 0.9"),
    "nesterov": (lambda: own_loop(sgd(momentum=0.9, nesterov=True)), "Nesterov's momentum 0.9"),
    "adam": (lambda: own_loop(lambda p: torch.optim.Adam(p, lr=0.001)), "Adam with lr 0.001"),
    "adamw": (lambda: own_loop(lambda p: torch.optim.AdamW(p, lr=0.1)), "Adam"),
    "rmsprop": (lambda: own_loop(lambda p: torch.optim.RMSprop(p, lr=0.001)), "RMSprop with lr"),
    "decay": (lambda: own_loop(sgd(weight_decay=0.05)), "weight_decay 0.05"),
    "rate": (lambda: own_loop(sgd(0.05)), "lr 0.05"),
    "sum": (
        lambda: own_loop(sgd(), loss=lambda o, y: F.cross_entropy(o, y, reduction="sum")),
        "lr 0.2 (as of a loss that is summed",
    ),
    "clipped": (lambda: own_loop(sgd(), clip=0.1), "gradients clipped to 0.1"),
    "weights": (
        lambda: own_loop(sgd(), loss=lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS), batch=8),
        "class weights in the ratio of",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_term_that_is_not_declared_contradicts_and_is_named(name: str) -> None:
    make, words = OTHERS[name]
    found = check(make())
    assert found.state == "contradicted"
    assert (found.alternative or "").startswith(words)
    assert found.alternative_cosine > 0.9999
    assert found.tensors and found.tensors[0].share > 0.0


def test_smoothing_that_hardly_turns_the_update_is_named_all_the_same() -> None:
    found = check(own_loop(sgd(), loss=lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)))
    assert found.alternative == "label smoothing 0.1"


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"algorithm": "fedavg", "local_steps": 1},
        {"algorithm": "fedavg", "batch_size": 2, "momentum": 0.5, "weight_decay": 0.05},
        {"algorithm": "fedavg", "batch_size": 2, "mu": 0.7},
        {"algorithm": "fedavg", "batch_size": 2, "optimizer": "adam", "lr": 0.001},
        {"augmentation": ["horizontal-flip", "random-crop"]},
    ],
)
def test_what_was_declared_rightly_is_confirmed(training: Any) -> None:
    found = check(client(6, **training))
    assert (found.state, found.alternative, found.tensors) == ("confirmed", None, [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: client(4, algorithm="fedavg", batch_size=2, local_epochs=2),
        lambda: client(4, dropout=0.5),
        lambda: client(2, {"name": "noise", "std": 0.01}),
        lambda: own_loop(sgd(), half=True),
        lambda: own_loop(sgd(), name=named(dropping)),
    ],
    ids=["orders", "dropout", "noise", "bfloat16", "a model's own dropout"],
)
def test_what_cannot_be_known_is_open_and_not_contradicted(make: Callable[[], Made]) -> None:
    assert check(make()).state in ("open", "confirmed")


def adam_with_batch_norm() -> Made:
    """Return an upload in which biases before a normalisation move by rounding alone."""
    seen, images, labels = own_loop(
        lambda p: torch.optim.Adam(p, lr=0.001), batch=4, name="lenet-strided-bn"
    )
    right = {"optimizer": "adam", "lr": 0.001}
    return replace(seen, declaration=seen.declaration.updated(right)), images, labels


@pytest.mark.parametrize(
    ("make", "arithmetic"),
    [
        (adam_with_batch_norm, "float32"),
        (lambda: own_loop(sgd(), half=True, batch=4, name="lenet-strided-bn"), "bfloat16"),
        pytest.param(
            lambda: own_loop(sgd(), half=True, batch=4, name="resnet20"),
            "bfloat16",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_difference_that_rounding_makes_is_open(
    make: Callable[[], Made], arithmetic: str
) -> None:
    found = check(make())
    assert found.state == "open" and arithmetic in found.reason


@pytest.mark.parametrize(
    "optimizer", [sgd(0.2), sgd(momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.001)]
)
@pytest.mark.parametrize(
    "name", ["lenet-strided-bn", pytest.param("resnet20", marks=pytest.mark.thorough)]
)
def test_rounding_explains_no_other_optimizer(name: str, optimizer: Any) -> None:
    assert check(own_loop(optimizer, batch=4, name=name)).state == "contradicted"


def test_later_passes_over_one_batch_of_all_examples_leave_no_order_open() -> None:
    whole: dict[str, Any] = {"algorithm": "fedavg", "local_epochs": 2, "batch_size": 4}
    assert check(client(4, **whole)).state == "confirmed"
    other = check(declared(client(4, **whole, momentum=0.9), momentum=0.0))
    assert (other.state, other.doubted) == ("contradicted", False)
    assert (other.alternative or "").startswith("momentum 0.9")


@pytest.mark.parametrize(
    ("optimizer", "declares"),
    [
        (sgd(), {}),
        (sgd(momentum=0.9), {"momentum": 0.9}),
        (lambda p: torch.optim.Adam(p, lr=0.001), {"optimizer": "adam", "lr": 0.001}),
    ],
)
def test_an_update_in_an_unknown_order_is_one_of_those_of_other_orders(
    optimizer: Any, declares: dict[str, Any]
) -> None:
    found = check(declared(own_loop(optimizer, epochs=3, batch=4), **declares))
    assert found.state == "confirmed" and "later passes" in found.reason
    assert not found.doubted


def test_what_no_order_explains_is_contradicted_and_another_description_is_found() -> None:
    found = check(own_loop(sgd(momentum=0.9), epochs=3, batch=4))
    assert (found.state, found.doubted) == ("contradicted", False)
    assert (found.alternative or "").startswith(("lr ", "momentum 0.9"))
    rate = check(own_loop(sgd(0.2), epochs=3, batch=4))
    assert rate.state == "contradicted" and (rate.alternative or "")[:15] == "lr of about 0.2"


def test_a_loss_of_the_clients_own_is_contradicted_in_every_order() -> None:
    weighed = own_loop(
        sgd(), loss=lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS), epochs=3, batch=4
    )
    found = check(weighed)
    assert (found.state, found.alternative) == ("contradicted", None)


def test_an_order_that_moves_the_update_far_leaves_a_difference_doubted() -> None:
    found = check(own_loop(sgd(0.2), epochs=3, batch=1, lr=0.2))
    assert (found.state, found.doubted) == ("open", True)


def test_augmented_inputs_of_later_passes_are_no_matter_of_order() -> None:
    seen = declared(own_loop(sgd(momentum=0.9), epochs=2), augmentation=("random-crop",))
    assert (check(seen).state, check(seen).doubted) == ("open", True)


def test_a_wrong_record_contradicts_and_nothing_explains_it() -> None:
    seen, images, labels = client(4)
    turned = {n: v.roll(1, -1) for n, v in seen.update.items()}
    found = check((replace(seen, update=turned), images, labels))
    assert (found.state, found.alternative) == ("contradicted", None)


@pytest.mark.parametrize(("normal", "state"), [(True, "open"), (False, "contradicted")])
def test_another_record_is_no_noise_that_hides_the_update(
    tiny: tuple[Tensor, Tensor],  # noqa: F811
    normal: bool,
    state: str,
) -> None:
    """What two initialisations differ by is as large as noise, and is not normal."""
    images, labels = (part[:6] for part in tiny)
    torch.manual_seed(0)
    seen = observed(images, labels, model=relu_mlp(), name=named(relu_mlp), steps=1)

    def drawn(value: Tensor) -> Tensor:
        like = torch.rand_like(value) - torch.rand_like(value)
        return 0.4 * torch.randn_like(value) if normal else like

    other = {name: value + drawn(value) for name, value in seen.update.items()}
    found = check_upload(replace(seen, update=other), Truth(images, labels), AttackTask())
    assert found.state == state


def test_twice_the_learning_rate_is_found_on_one_step() -> None:
    found = check(declared(client(1, algorithm="fedavg", local_steps=1, lr=0.5), lr=0.25))
    assert (found.state, found.alternative) == ("contradicted", "lr 0.5")
