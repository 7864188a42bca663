from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bract.attacks import Problem
from bract.attacks.problem.case import open_case
from bract.attacks.solve.regularizers import BatchNormStatistics, TotalVariation
from bract.models import MODELS
from bract.updates.update import buffers_of


class NormFirst(nn.Module):
    """Batch normalisation of the input itself, so its statistics are known by hand."""

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels * image_size**2, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(images).flatten(1))
        return result


def problem_of(*observations: Any) -> Any:
    cases = [open_case(o, tier="oblivious", max_images=8, unroll=16) for o in observations]
    return Problem.stack([(case, 0) for case in cases], seed=0, device=torch.device("cpu"))


def test_total_variation_of_a_ramp_by_hand() -> None:
    problem: Any = None  # total variation reads the images only
    ramp = torch.tensor([[0.0, 0.5, 1.0]]).expand(2, 3).reshape(1, 1, 1, 2, 3)
    assert TotalVariation(weight=2.0)(problem, ramp).tolist() == pytest.approx([1.0])
    assert TotalVariation(weight=2.0, power=2)(problem, ramp).tolist() == pytest.approx([0.5])


def test_returned_buffers_give_the_statistics_of_the_clients_own_batch(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-norm-first", NormFirst)
    images, labels = digits[0][:4], digits[1][:4]
    torch.manual_seed(0)
    network = NormFirst(classes=10, channels=1, image_size=16).train()
    seen = observe(images, labels, model=network)
    seen = replace(
        seen,
        declaration=seen.declaration.updated({"model": "test-norm-first"}),
        returned_buffers=buffers_of(network),
    )
    prior = BatchNormStatistics(weight=1.0)
    problem = problem_of(seen)
    assert float(prior(problem, images[None])) < 1e-5
    assert float(prior(problem, 1 - images[None])) > 0.1
    blind = problem_of(replace(seen, returned_buffers={}))
    assert float(prior(blind, images[None])) > 0.05


def test_models_without_batch_normalisation_are_left_alone(observe: Any, digits: Any) -> None:
    problem = problem_of(observe(digits[0][:1], digits[1][:1]))
    assert float(BatchNormStatistics(weight=1.0)(problem, digits[0][None, :1])) == 0.0


class Untraceable(NormFirst):
    """The same with control flow on values, which only `torch.func.vmap` can run."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.abs().flatten().shape[0] == sum(1 for _ in images.flatten(1)):
            return super().forward(-images)
        return super().forward(images)


def test_the_order_of_later_epochs_is_nothing_that_a_model_holds(
    observe: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-untraceable", Untraceable)
    network = Untraceable(classes=10, channels=1, image_size=16)
    seen = observe(digits[0][:4], digits[1][:4], model=network, steps=4, batch_size=2)
    seen = replace(seen, declaration=seen.declaration.updated({"model": "test-untraceable"}))
    problem = problem_of(seen, seen)
    assert problem.target_model.network is None
    images = digits[0][None, :4].expand(2, 4, 1, 16, 16)
    assert BatchNormStatistics(weight=1.0)(problem, images).shape == (2,)
