from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import BatchGradient, loss_gradient
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.training_path import TrainingPath


def simulated(seen: Any, forward: Any, images: Any, labels: Any) -> Any:
    case = replace(open_case(seen, tier="oblivious", max_images=8, unroll=4), forward=forward)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    rows = nn.functional.one_hot(labels, 10)[None].double()
    return problem, problem.simulate(images[None].double(), rows, {})


def residual(seen: Any, forward: Any, images: Any, labels: Any) -> float:
    _, made = simulated(seen, forward, images, labels)
    wanted = seen.gradient()
    error = sum(float((made[n][0] - g).square().sum()) for n, g in wanted.items())
    return error / sum(float(g.square().sum()) for g in wanted.values())


def test_long_training_is_nearer_to_its_path_than_to_its_start(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = observe(images, labels, model="lenet", steps=10, batch_size=2, lr=0.05)
    path = residual(seen, TrainingPath(), images, labels)
    assert path < 0.5 * residual(seen, BatchGradient(), images, labels)
    assert residual(seen, TrainingPath(nodes=5), images, labels) < path


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


def test_the_path_serves_long_undefended_sgd_alone(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:4], digits[1][:4], steps=6, batch_size=2, lr=0.1)

    def forward(**declared: Any) -> Any:
        changed = replace(seen, declaration=seen.declaration.updated(declared))
        return open_case(changed, tier="oblivious", max_images=8, unroll=4).forward

    assert forward() == TrainingPath()
    assert forward(optimizer="adam") == BatchGradient()
    assert forward(local_steps=1) == BatchGradient()
    assert forward(lr=None) == BatchGradient()
    assert forward(defenses=[{"name": "clipping", "max_norm": 1.0}]) == BatchGradient()
    assert open_case(seen, tier="oblivious", max_images=8, unroll=6).forward != TrainingPath()
