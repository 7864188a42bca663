from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract.attacks import Budget, Problem, Reconstruction, Refusal, reconstruct
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import BatchGradient, loss_gradient
from bract.attacks.problem.epoch_orders import batch_of
from bract.attacks.problem.training_path import MOVED, WEIGHTS, TrainingPath
from bract.errors import BractError
from bract.models import create_model
from bract.models.initialise import initialise


def simulated(seen: Any, forward: Any, images: Any, labels: Any, unknowns: Any = None) -> Any:
    opened = open_case(seen, tier="oblivious", max_images=len(images), unroll=4)
    case = replace(opened, forward=forward)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    rows = nn.functional.one_hot(labels, 10)[None].double()
    return problem, problem.simulate(images[None].double(), rows, unknowns or {})


def residual(seen: Any, forward: Any, images: Any, labels: Any, unknowns: Any = None) -> float:
    _, made = simulated(seen, forward, images, labels, unknowns)
    wanted = seen.gradient()
    error = sum(float((made[n][0] - g).square().sum()) for n, g in wanted.items())
    return error / sum(float(g.square().sum()) for g in wanted.values())


def test_long_training_is_nearer_to_its_path_than_to_its_start(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = observe(images, labels, model="lenet", steps=10, batch_size=2, lr=0.05)
    path = residual(seen, TrainingPath(), images, labels)
    assert path < 0.5 * residual(seen, BatchGradient(), images, labels)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "lr"), [("sgd", 0.9, 0.001), ("adam", 0.0, 0.0003)]
)
def test_long_training_with_moments_is_nearer_to_its_path_than_plain_gradients_are(
    observe: Any, digits: Any, optimizer: str, momentum: float, lr: float
) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    seen = observe(
        *(images, labels),
        **{"steps": 20, "batch_size": 2, "lr": lr, "optimizer": optimizer, "momentum": momentum},
    )
    forward = open_case(seen, tier="oblivious", max_images=8, unroll=4).forward
    path = residual(seen, forward, images, labels)
    assert path < 0.3 * residual(seen, BatchGradient(), images, labels)
    assert path < 0.3 * residual(seen, TrainingPath(), images, labels)


@pytest.mark.parametrize(
    ("optimizer", "lr", "momentum", "pull"),
    [
        ("sgd", 0.01, 0.0, {"proximal_mu": 5.0}),
        ("sgd", 0.01, 0.0, {"weight_decay": 1.0}),
        ("sgd", 0.001, 0.9, {"proximal_mu": 5.0}),
        ("adam", 3e-4, 0.0, {"proximal_mu": 1.0}),
        ("adam", 3e-4, 0.0, {"weight_decay": 0.01}),
    ],
)
def test_what_pulls_a_step_back_is_simulated(
    observe: Any, digits: Any, optimizer: str, lr: float, momentum: float, pull: dict[str, float]
) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    settings: dict[str, Any] = {"lr": lr, "optimizer": optimizer, "momentum": momentum}
    seen = observe(images, labels, steps=20, batch_size=4, **settings, **pull)
    forward: Any = open_case(seen, tier="oblivious", max_images=8, unroll=4).forward
    without = replace(forward, proximal_mu=0.0, weight_decay=0.0)
    pulled, free = (residual(seen, each, images, labels) for each in (forward, without))
    assert pulled < (0.35 if optimizer == "sgd" else 0.8) * free


@pytest.mark.parametrize(
    "claimed",
    [
        {"local_steps": 2000, "proximal_mu": 50.0},
        {"local_steps": 18, "lr": 1.0, "momentum": 0.99, "proximal_mu": 0.9218306162374207},
        {"local_steps": 20, "weight_decay": 1e300},
    ],
    ids=["diverging", "back at the start", "huge"],
)
def test_declared_steps_that_show_no_gradient_are_refused(
    observe: Any, digits: Any, claimed: dict[str, Any]
) -> None:
    seen = observe(digits[0][:4], digits[1][:4], steps=2, lr=0.1)
    bad = replace(seen, declaration=seen.declaration.updated(claimed), client="client-9")
    with pytest.raises(BractError, match=r"client-9: (what pulls|the update is not finite)"):
        open_case(bad, tier="oblivious", max_images=8, unroll=4)
    first, second = reconstruct([seen, bad], "ig", budget=Budget(iterations=1), device="cpu")
    assert isinstance(first, Reconstruction) and isinstance(second, Refusal)


def test_a_heavy_ball_that_overshoots_is_no_divergence(observe: Any, digits: Any) -> None:
    """FedProx as it is used: a mu of 1, a rate of 0.01, momentum 0.9."""
    images, labels = digits[0][:8], digits[1][:8]
    settings = {"lr": 0.01, "momentum": 0.9, "proximal_mu": 1.0}
    seen = observe(images, labels, steps=50, batch_size=4, **settings)
    forward: Any = open_case(seen, tier="oblivious", max_images=8, unroll=4).forward
    assert forward.share == 1.0 and forward.gain > 0.0
    without = replace(forward, proximal_mu=0.0)
    pulled, free = (residual(seen, each, images, labels) for each in (forward, without))
    assert pulled < free


@pytest.mark.parametrize(
    ("images", "batch", "steps"),
    [(9, 8, 20), (8, 2, 6), (9, 2, 17)],
    ids=["last", "part", "both"],
)
def test_images_of_smaller_batches_and_of_a_part_of_an_epoch_count_more(
    observe: Any, digits: Any, images: int, batch: int, steps: int
) -> None:
    pictures, labels = digits[0][:images], digits[1][:images]
    network = create_model(
        "lenet-strided", classes=10, channels=1, image_size=16, activation="relu"
    )
    seen = observe(
        *(pictures, labels),
        **{"steps": steps, "batch_size": batch, "lr": 0.005},
        model=initialise(network, "default", 0),
        activation="relu",
    )
    seen = replace(seen, declaration=seen.declaration.updated({"model": "lenet-strided"}))
    forward = open_case(seen, tier="oblivious", max_images=images, unroll=4).forward
    assert forward == TrainingPath(uneven=images)
    counts = torch.zeros(images)
    for step in range(steps):
        taken = batch_of(step, images, batch)
        counts[taken.start : taken.stop] += 1.0 / len(taken)
    found = {WEIGHTS: counts.log()[None].double()}
    known, equal = (residual(seen, forward, pictures, labels, unknowns) for unknowns in (found, {}))
    assert known < 0.4 * equal
    declared = seen.declaration.updated({"num_examples": 2 * images})
    other = open_case(
        replace(seen, declaration=declared), tier="oblivious", max_images=images, unroll=4
    )
    assert other.forward == TrainingPath()


def test_momentum_as_worked_by_hand() -> None:
    """Momentum 0.5, three steps of gradient 1: velocities 1, 1.5 and 1.75, 4.25 in all.

    They begin at 0, 1 and 2.5 on the way; gradient k is in the update 1.75, 1.5 and 1 times:
    (0 + 1.5 + 2.5) / 4.25^2.
    """
    path = TrainingPath(steps=3, momentum=0.5)
    assert path.gain == pytest.approx(4.25 / 3)
    assert path.share == pytest.approx(4.0 / 4.25**2)
    assert TrainingPath(steps=9).gain == 1.0


def test_adam_on_constant_gradients_goes_by_their_sign() -> None:
    gradients = [{"w": torch.tensor([[0.3, -2e-3]])}] * 3
    path = TrainingPath(steps=7, optimizer="adam")
    moved = {MOVED + "w": torch.ones(1, 2)}
    made = path.mean_direction(gradients, {"w": torch.zeros(1, 2)}, moved)["w"]
    assert torch.allclose(made, torch.tensor([[1.0, -1.0]]), atol=1e-4)


def test_the_path_takes_gradients_at_the_middle_of_the_known_line(
    observe: Any, digits: Any
) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = observe(images, labels, steps=6, batch_size=2, lr=0.1)
    problem, made = simulated(seen, TrainingPath(), images, labels)
    middle = {
        n: (v.double() - 0.5 * seen.update[n].double())[None] for n, v in seen.parameters.items()
    }
    rows = nn.functional.one_hot(labels, 10)[None].double()
    inputs = problem.target_model.normalise(images[None].double())
    wanted = loss_gradient(problem.target_model, middle, {}, inputs, rows)
    for name, value in wanted.items():
        assert torch.allclose(made[name], value, atol=1e-7), name


def test_the_path_serves_long_undefended_training_by_simulated_optimizers_alone(
    observe: Any, digits: Any
) -> None:
    seen = observe(digits[0][:4], digits[1][:4], steps=6, batch_size=2, lr=0.1)

    def forward(**declared: Any) -> Any:
        changed = replace(seen, declaration=seen.declaration.updated(declared))
        return open_case(changed, tier="oblivious", max_images=8, unroll=4).forward

    assert forward() == TrainingPath()
    assert forward(optimizer="adam") == TrainingPath(steps=6, batch_size=2, optimizer="adam")
    assert forward(momentum=0.9) == TrainingPath(steps=6, batch_size=2, momentum=0.9)
    assert forward(optimizer="adagrad") == BatchGradient()
    assert forward(local_steps=1) == BatchGradient()
    assert forward(lr=None) == BatchGradient()
    assert forward(defenses=[{"name": "clipping", "max_norm": 1.0}]) == BatchGradient()
    assert open_case(seen, tier="oblivious", max_images=8, unroll=6).forward != TrainingPath()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_claim_of_a_billion_steps_costs_no_more_than_ten_thousand(
    observe: Any, digits: Any, optimizer: str
) -> None:
    images, labels = digits[0][:2], digits[1][:2]
    seen = observe(images, labels, steps=2, lr=0.001, momentum=0.9)
    claimed = {"local_steps": 10**9, "weight_decay": 1e-4, "optimizer": optimizer}
    seen = replace(seen, declaration=seen.declaration.updated(claimed))
    forward = open_case(seen, tier="oblivious", max_images=2, unroll=4).forward
    assert isinstance(forward, TrainingPath)
    # A decay by 1e-7 a step holds the parameters a hundredth of that way from where they began.
    assert forward.share == pytest.approx(1.0 if optimizer == "sgd" else 0.5, abs=0.02)
    assert forward.gain == pytest.approx(0.01 if optimizer == "sgd" else 1.0, rel=0.01)
    _, made = simulated(seen, forward, images, labels)
    assert all(bool(value.isfinite().all()) for value in made.values())


@pytest.mark.parametrize("momentum", [1.0, 1e300])
def test_a_capture_of_no_possible_momentum_is_refused_by_name(
    observe: Any, digits: Any, momentum: float
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    seen = replace(seen, declaration=seen.declaration.updated({"momentum": momentum}))
    with refused("declaration-wrong", "client-0", "declaration.momentum"):
        seen.check()
