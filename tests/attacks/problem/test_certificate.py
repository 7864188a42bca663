"""What a certificate claims without the truth, held against the truth."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from observing import observed
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation
from bract.attacks import Attack, Engine, Outcome, Problem, Reconstruction, Run, reconstruct
from bract.attacks.methods.analytic import Analytic
from bract.attacks.methods.patch_embedding.patch_embedding import PatchEmbedding
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.methods.r_gap.r_gap import RGAP
from bract.attacks.problem.case import open_case
from bract.attacks.problem.certificate import certified, layer_residuals, rounding
from bract.attacks.solve.descent import Recipe
from bract.models import MODELS, create_model
from bract.models.initialise import initialise
from bract.schema.audit import Certificate
from bract.scores import match

WIDE, NARROW = "vit(patch=4,width=80,depth=2,heads=2)", "vit(patch=4,width=20,depth=1,heads=2)"

RIGHT = 1e-2
"""Error of a pixel above which an image counts as wrong."""


def perceptron(
    *, classes: int, channels: int, image_size: int, activation: str = "relu"
) -> nn.Module:
    act = nn.ReLU() if activation == "relu" else nn.Sigmoid()
    inputs = channels * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 96), act, nn.Linear(96, classes))


@pytest.fixture(autouse=True)
def _perceptron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "test-mlp", perceptron)


def images(seed: int, count: int = 1, *, channels: int = 1, size: int = 8) -> Tensor:
    coarse = torch.rand(count, channels, 4, 4, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def seen_through(
    model: str, batch: Tensor, labels: list[int], *, seed: int = 0, act: str = "relu", **more: Any
) -> Observation:
    torch.manual_seed(seed)
    channels, size, _ = batch.shape[1:]
    network = create_model(model, classes=10, channels=channels, image_size=size, activation=act)
    if model == "lenet-strided":
        network = initialise(network, "default", seed)
    seen = observed(batch, torch.tensor(labels), model=network, name=model, **more)
    return replace(seen, declaration=seen.declaration.updated({"activation": act}))


def error(found: Reconstruction, batch: Tensor) -> float:
    return float((found.images[match(found.images, batch)] - batch).abs().max())


def _cases(seeds: int = 1) -> list[tuple[Attack, Observation, Tensor, list[int]]]:
    cases: list[tuple[Attack, Observation, Tensor, list[int]]] = []
    for seed in range(seeds):
        one = images(seed)
        for act in ("relu", "sigmoid"):
            for steps in ({}, {"steps": 1, "lr": 0.1}, {"steps": 4, "lr": 0.1}):
                seen = seen_through("test-mlp", one, [seed], seed=seed, act=act, **steps)
                cases.append((Analytic(), seen, one, [seed]))
            chain = seen_through("lenet-strided", one, [seed], seed=seed, act=act)
            cases.append((RGAP(), chain, one, [seed]))
        colour = images(seed, channels=3, size=16)
        for model in (WIDE, NARROW):
            seen = seen_through(model, colour, [seed], seed=seed)
            cases.append((PatchEmbedding(), seen, colour, [seed]))
    return cases


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_every_certified_image_is_right_and_most_right_ones_are_certified(seeds: int) -> None:
    right = certified = 0
    for attack, seen, batch, _ in _cases(seeds):
        (found,) = reconstruct([seen], attack)
        assert isinstance(found, Reconstruction), found
        off, proof = error(found, batch), found.certificate
        right += off < RIGHT
        if proof is not None:
            certified += 1
            assert off <= proof.error <= RIGHT
            assert proof.residual <= proof.rounding < 1e-4
    assert right >= 10 * seeds
    assert certified >= 0.75 * right


def test_the_true_images_leave_less_than_the_rounding_that_is_allowed() -> None:
    for _, seen, batch, labels in _cases():
        case = open_case(seen, tier="oblivious", max_images=8)
        problem = Problem.stack(
            [(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64
        )
        rows = F.one_hot(torch.tensor(labels), problem.classes).double()[None]
        made = problem.simulate(batch.double()[None], rows, problem.unknowns())
        found = layer_residuals({n: v.detach() for n, v in made.items()}, problem.target)
        assert max(float(v) / rounding(case, n) for n, v in found.items()) < 1.0


@dataclass(frozen=True, kw_only=True)
class Claiming(Attack):
    """Returns given images and labels, and claims that its equations have one solution."""

    name: ClassVar[str] = "claiming"
    images: Tensor
    labels: Tensor

    def solve(self, problem: Problem, run: Run) -> Outcome:
        shown = F.one_hot(self.labels, problem.classes).double()
        return Outcome(
            images=self.images.double()[None],
            labels=shown[None],
            losses=torch.zeros(problem.trials),
            recipes=[Recipe("", (), 0.0)] * problem.trials,
        )


def claimed(seen: Observation, shown: Tensor, labels: list[int]) -> Certificate | None:
    return Claiming(images=shown, labels=torch.tensor(labels))(seen).certificate


def test_a_wrong_image_of_a_small_residual_is_not_certified() -> None:
    image = images(3)
    seen = seen_through("lenet-strided", image, [4])
    assert claimed(seen, image, [4]) is not None
    nudged = image + 1e-4 * torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    found = Claiming(images=nudged, labels=torch.tensor([4]))(seen)
    assert found.gradient_residual is not None and found.gradient_residual < 1e-2
    assert found.certificate is None
    assert claimed(seen, image, [7]) is None
    assert claimed(seen, image.flip(-1), [4]) is None


def test_a_batch_is_not_certified() -> None:
    """Rows that agree do not show that no other images give the sum."""
    batch, labels = images(3, 2), [4, 7]
    seen = seen_through("lenet-strided", batch, labels)
    assert claimed(seen, batch, labels) is None
    alike = seen_through("test-mlp", batch, [4, 4])
    assert Analytic()(alike).certificate is None


def test_an_update_that_rounding_hides_is_not_certified() -> None:
    """At a tiny learning rate the difference of two models is mostly rounding."""
    image = images(3)
    shown, hidden = (
        claimed(seen_through("test-mlp", image, [4], steps=1, lr=lr), image, [4])
        for lr in (0.1, 1e-6)
    )
    assert shown is not None and hidden is None


def test_what_is_no_image_is_not_certified() -> None:
    case = open_case(seen_through("test-mlp", images(3), [4]), tier="oblivious", max_images=1)
    declared = case.observation.declaration
    row = replace(case.observation, declaration=declared.updated({"input": "table"}))
    made, other = (
        certified(one, count=1, residuals={"1.weight": 0.0}, error=0.0, unknowns={})
        for one in (case, replace(case, observation=row))
    )
    assert made is not None and other is None


def test_a_layer_of_small_gradients_counts_as_much_as_the_others() -> None:
    target = {"image": torch.full((1, 4), 1e-2), "head": torch.full((1, 4), 10.0)}
    simulated = {"image": torch.full((1, 4), 2e-2), "head": torch.full((1, 4), 10.0)}
    found = layer_residuals(simulated, target)
    assert float(found["image"]) == pytest.approx(1.0, rel=1e-3)
    # A thousandth of the update is the least size, so what is nothing but rounding stays small.
    one = torch.ones(1, 1)
    nothing = layer_residuals({"a": one, "b": 1e-9 * one}, {"a": one, "b": 0.0 * one})
    assert float(nothing["b"]) == pytest.approx(1e-6)


def skipping(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """See every second pixel of every second row, and no other."""
    side = image_size // 2
    return nn.Sequential(
        nn.Conv2d(channels, 8, 1, stride=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(8 * side**2, classes),
    )


def test_an_image_with_fewer_equations_than_unknowns_is_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-skipping", skipping)
    batch = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = RGAP()(seen_through("test-skipping", batch, [2]))
    assert float((found.images - batch)[..., ::2, ::2].abs().max()) < 1e-4
    assert error(found, batch) > RIGHT
    assert found.gradient_residual is not None and found.gradient_residual < 1e-6
    assert found.certificate is None


def test_an_update_that_is_not_the_gradient_alone_is_not_certified() -> None:
    seen = seen_through("test-mlp", images(3), [4])
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: value + 1e-4 * value.abs().mean() * torch.randn(value.shape, generator=generator)
        for name, value in seen.update.items()
    }
    assert Analytic()(seen).certificate is not None
    assert Analytic()(replace(seen, update=noisy)).certificate is None


@pytest.mark.thorough
def test_the_portfolio_and_a_checkpoint_keep_the_certificate(tmp_path: Any) -> None:
    seen = seen_through("lenet-strided", images(2), [3], act="sigmoid")
    proof = RGAP()(seen).certificate
    assert proof is not None and Best()(seen).certificate == proof
    engine = Engine(checkpoint=tmp_path)
    for _ in range(2):
        (found,) = reconstruct([seen], RGAP(), engine=engine)
        assert isinstance(found, Reconstruction)
        assert found.certificate == proof
        assert found.record().certificate == proof
