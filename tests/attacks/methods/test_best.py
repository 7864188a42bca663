from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import scores
from torch import nn

from bract.attacks import Best, Budget
from bract.attacks.methods.best import BN_WEIGHT, statistics_weight
from bract.attacks.problem.case import open_case
from bract.attacks.problem.problem import Problem
from bract.models import create_model
from bract.protocol.observation import ClientDeclaration, Observation
from bract.protocol.update import buffers_of, difference, parameters_of


def one_step(
    images: Any,
    labels: Any,
    *,
    steps: Any = 1,
    activation: Any = "sigmoid",
    model: Any = "lenet-strided-bn",
) -> Any:
    """What a client returns after one step of local training, its buffers among it."""
    size = images.shape[-1]
    torch.manual_seed(0)
    network = create_model(
        model, classes=10, channels=1, image_size=size, activation=activation
    ).train()
    sent, buffers = parameters_of(network), buffers_of(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return Observation(
        round=1,
        client="client-0",
        parameters=sent,
        buffers=buffers,
        returned_buffers=buffers_of(network),
        update=difference(sent, parameters_of(network)),
        declaration=ClientDeclaration(
            model=model,
            activation=activation,
            image_shape=(1, size, size),
            classes=10,
            batch_size=len(images),
            num_examples=len(images),
            lr=0.1,
            local_steps=steps,
        ),
    )


@pytest.fixture
def odd(digits: Any) -> Any:
    """A digit of 9x9 pixels, which no generator makes, and its label."""
    return nn.functional.interpolate(digits[0][:1], size=(9, 9), mode="area"), digits[1][:1]


def weight(seen: Any) -> Any:
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    return statistics_weight(Problem.stack([(case, 0)], seed=0, device=torch.device("cpu")))


def test_only_the_batchs_own_statistics_count(odd: Any) -> None:
    seen = one_step(*odd)
    assert weight(seen) == BN_WEIGHT > 0
    assert weight(replace(seen, returned_buffers={})) == 0
    assert weight(replace(seen, declaration=seen.declaration.updated({"norm_mode": "eval"}))) == 0
    assert weight(one_step(*odd, steps=2)) == 0


def test_returned_statistics_bring_back_what_normalisation_hides(odd: Any) -> None:
    seen = one_step(*odd)
    budget = Budget(iterations=150)
    best = Best(max_unknowns=1)  # too many pixels to solve for
    known = scores(best(seen, budget=budget).images, odd[0])[0].psnr
    unknown = best(replace(seen, returned_buffers={}), budget=budget)
    assert known > scores(unknown.images, odd[0])[0].psnr + 10
