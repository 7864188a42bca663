from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import one_step, scores
from torch import nn

from bract.attacks import Budget
from bract.attacks.methods.portfolio.portfolio import BN_WEIGHT, Best, statistics_weight
from bract.attacks.problem.case import open_case
from bract.attacks.problem.problem import Problem


@pytest.fixture
def odd(digits: Any) -> Any:
    """A digit of 9x9 pixels, which no generator makes, and its label."""
    return nn.functional.interpolate(digits[0][:1], size=(9, 9), mode="area"), digits[1][:1]


def weight(seen: Any) -> Any:
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    return statistics_weight(Problem.stack([(case, 0)], seed=0, device=torch.device("cpu")))


def test_only_the_clients_own_statistics_count(odd: Any) -> None:
    seen = one_step(*odd)
    assert weight(seen) == BN_WEIGHT > 0
    assert weight(replace(seen, returned_buffers={})) == 0
    assert weight(replace(seen, declaration=seen.declaration.updated({"norm_mode": "eval"}))) == 0
    assert weight(one_step(*odd, steps=2)) == BN_WEIGHT


def test_returned_statistics_bring_back_what_normalisation_hides(odd: Any) -> None:
    seen = one_step(*odd)
    budget = Budget(iterations=150)
    best = Best(max_unknowns=1)  # too many pixels to solve for
    known = scores(best(seen, budget=budget).images, odd[0])[0].psnr
    unknown = best(replace(seen, returned_buffers={}), budget=budget)
    assert known > scores(unknown.images, odd[0])[0].psnr + 10
