from dataclasses import replace
from typing import Any

import pack
import pytest
import torch
from observing import one_step, scores
from torch import nn

from bract.attacks import Budget, Problem, attack
from bract.attacks.methods.ig import BN_WEIGHT, statistics_weight
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.problem.case import open_case


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


def test_a_batch_through_a_relu_is_read_off_by_its_factors() -> None:
    given = pack.held("mlp-100-relu-b4")
    found = attack("best")(given.seen, budget=Budget(iterations=200))
    assert found.method == "spear"
    assert min(row.psnr or 0.0 for row in scores(found.images, given.images)) > 60
    without = Best(closed_forms=False)(given.seen, budget=Budget(iterations=3))
    assert without.method != "spear"  # auto has tried it


@pytest.mark.thorough
def test_labels_of_a_batch_behind_a_deep_network_are_inferred() -> None:
    torch.manual_seed(11)
    wanted = torch.tensor([1, 4, 4, 7])
    images = torch.rand(4, 1, 32, 32).round()
    # Without buffers no features are read, from which the labels would come.
    seen = replace(
        one_step(images, wanted, activation="relu", model="resnet20"), returned_buffers={}
    )
    found = Best()(seen, budget=Budget(iterations=4, max_images=4))
    inferred = attack("ig")(seen, budget=Budget(iterations=1, max_images=4)).labels
    searched = attack("grnn")(seen, budget=Budget(iterations=4, max_images=4)).labels
    assert found.method == "grnn" and found.labels.tolist() == inferred.tolist()
    assert sorted(searched.tolist()) != sorted(inferred.tolist())
