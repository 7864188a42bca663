"""The attacker of per-example privacy knows the law of the noise that its steps add up to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from bract import Observation
from bract.attacks import ADAPTIVE, Known
from bract.schema import ClientDeclaration


def observed(steps: int, *, multiplier: float = 2.0, momentum: float = 0.0, **changes: Any) -> Any:
    """An update that is noise alone, made step by step."""
    generator = torch.Generator().manual_seed(3)
    moved, velocity = torch.zeros(40_000), torch.zeros(40_000)
    for _ in range(steps):
        noise = multiplier * 0.5 / 4 * torch.randn(40_000, generator=generator)
        velocity = momentum * velocity + noise
        moved += 0.1 * velocity
    declaration = ClientDeclaration(
        algorithm="fedavg",
        optimizer="sgd",
        lr=0.1,
        momentum=momentum,
        local_steps=steps,
        batch_size=4,
        defenses=({"name": "per-example", "noise_multiplier": multiplier, "max_grad_norm": 0.5},),
    )
    return Observation(
        round=1,
        client="client-0",
        parameters={"w": torch.zeros(40_000)},
        update={"w": moved},
        declaration=replace(declaration, **changes),
    )


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (9, 0.0), (9, 0.8)])
def test_the_known_deviation_is_that_of_the_added_steps(steps: int, momentum: float) -> None:
    observation = observed(steps, momentum=momentum)
    evidence = ADAPTIVE["per-example"](observation, Known())
    found = float(evidence.target["w"].std())
    assert evidence.notes["deviation"] == pytest.approx(found, rel=0.03)


def test_an_upload_quieter_than_its_noise_is_refused() -> None:
    quiet = observed(1)
    loud = ({"name": "per-example", "noise_multiplier": 3.0, "max_grad_norm": 0.5},)
    declared = replace(quiet.declaration, defenses=loud)
    with refused("declaration-wrong", "declared"):
        ADAPTIVE["per-example"](replace(quiet, declaration=declared), Known())


def test_noise_of_adam_has_no_known_law() -> None:
    with refused("attack-unsuited", "adam"):
        ADAPTIVE["per-example"](observed(2, optimizer="adam"), Known())
