"""The consensus of several restarts, by hand."""

from typing import Any

import pytest
import torch

from bract.attacks import Problem
from bract.attacks.problem.case import open_case
from bract_papers.gradinversion.group_consistency import (
    REACH,
    GroupConsistency,
    consensus,
    shift_onto,
)


def blob(down: int, right: int, side: int = 12) -> Any:
    """One bright square of two pixels on black, ``(1, side, side)``."""
    image = torch.zeros(1, side, side)
    image[:, down : down + 2, right : right + 2] = 1.0
    return image


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -3), (-REACH, REACH)])
def test_a_shifted_image_is_shifted_back(down: int, right: int) -> None:
    target = blob(5, 5)[None]
    assert torch.equal(shift_onto(target, blob(5 + down, 5 + right)[None], REACH), target)


def test_nothing_is_shifted_further_than_the_reach() -> None:
    target, far = blob(9, 9, side=20)[None], blob(9 + REACH + 2, 9, side=20)[None]
    assert torch.equal(shift_onto(target, far, REACH), far)


def test_a_shift_repeats_the_edge_that_it_leaves() -> None:
    image = torch.tensor([1.0, 1, 1, 1, 9, 1, 1, 1, 3]).expand(1, 1, 9, 9)
    target = torch.cat([image[..., :1], image[..., :-1]], dim=-1)
    assert torch.equal(shift_onto(target, image, 1), target)


def test_a_flat_image_stays() -> None:
    flat = torch.full((2, 3, 8, 8), 0.5)
    assert torch.equal(shift_onto(torch.rand(2, 3, 8, 8), flat, REACH), flat)


def test_the_consensus_is_the_mean_of_what_was_registered() -> None:
    # The mean of three has its peak where two agree; the third one is moved there.
    images = torch.stack([blob(4, 4), blob(4, 4), blob(6, 4)])[:, None]
    found = consensus(images, torch.zeros(3, 1, dtype=torch.int64))
    assert torch.equal(found, blob(4, 4)[None, None].expand(3, 1, 1, 12, 12))


def test_images_of_one_class_are_paired_before_they_are_averaged() -> None:
    one, two, other = blob(1, 1), blob(8, 8), blob(1, 8)
    images = torch.stack([torch.stack([one, two, other]), torch.stack([two, one, other])])
    labels = torch.tensor([[3, 3, 5], [3, 3, 5]])
    assert torch.equal(consensus(images, labels), images)
    # Of different classes each image stands for its own.
    apart = consensus(images, torch.tensor([[3, 4, 5], [3, 4, 5]]))
    assert torch.equal(apart[:, 0], ((one + two) / 2).expand(2, 1, 12, 12))


def problem_of(trials: Any) -> Any:
    return Problem.stack(trials, seed=0, device=torch.device("cpu"))


@pytest.fixture
def cases(observe: Any, tiny: Any) -> Any:
    seen = [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(2)]
    return [open_case(o, tier="oblivious", max_images=1, unroll=16) for o in seen]


def prior_of(trials: int) -> GroupConsistency:
    return GroupConsistency(weight=3.0, labels=torch.zeros(trials, 1, dtype=torch.int64))


def test_restarts_of_one_upload_are_held_together_and_uploads_are_not(cases: Any) -> None:
    problem = problem_of([(cases[0], 0), (cases[0], 1), (cases[1], 0)])
    levels = torch.tensor([0.2, 0.6, 0.9])
    images = levels.view(3, 1, 1, 1, 1).expand(3, 1, 1, 8, 8).clone().requires_grad_()
    loss = prior_of(3)(problem, images)
    # By hand: both are 0.2 from 0.4, so 3 * 0.04; the third is alone.
    assert torch.allclose(loss, torch.tensor([0.12, 0.12, 0.0]))
    loss.sum().backward()
    slope = 3.0 * 2 * 0.2 / 64
    assert images.grad is not None
    wanted = torch.tensor([-slope, slope, 0.0])
    assert torch.allclose(images.grad.mean(dim=(1, 2, 3, 4)), wanted)


def test_a_single_restart_agrees_with_itself(cases: Any) -> None:
    problem = problem_of([(cases[0], 0), (cases[1], 0)])
    prior = prior_of(2)
    assert torch.equal(prior(problem, torch.rand(2, 1, 1, 8, 8)), torch.zeros(2))
    assert prior.component(problem) is None
    assert prior_of(1).component(problem_of([(cases[0], 0), (cases[0], 1)])) == "group consistency"


def test_starts_of_one_restart_are_rivals_and_no_group(cases: Any) -> None:
    problem = problem_of([(cases[0], 0)]).select([0, 0])
    assert torch.equal(prior_of(2)(problem, torch.rand(2, 1, 1, 8, 8)), torch.zeros(2))
