"""The estimate of what an upload reveals, against a dense computation that shares no code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd
from torch.nn import functional as F

from bract import Observation
from bract.attacks import Case, Evidence
from bract.attacks.problem import identifiability as module
from bract.attacks.problem.case import open_case
from bract.attacks.problem.identifiability import NEIGHBOURS, PIXEL_VARIANCE, identifiability
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.visibility import smooth_images
from bract.models import create_model
from bract.schema import ClientDeclaration
from bract.updates.update import parameters_of

SIDE = 8
PRIOR = -10 * math.log10(PIXEL_VARIANCE)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("lenet-strided", classes=10, channels=1, image_size=SIDE)


def opened(model: Any, evidence: dict[str, Any] | None = None, **declared: Any) -> Case:
    loss = F.cross_entropy(model(torch.rand(1, 1, SIDE, SIDE)), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    update = dict(zip(parameters_of(model), gradients, strict=True))
    declaration = ClientDeclaration(
        algorithm="fedsgd", model="lenet-strided", image_shape=(1, SIDE, SIDE), classes=10,
        mean=(0.0,), std=(1.0,), batch_size=1, num_examples=1,
    )  # fmt: skip
    seen = Observation(1, "a", parameters_of(model), update, replace(declaration, **declared))
    about: dict[str, Any] = {"target": seen.gradient(), "labels": torch.tensor([3])}
    given = Evidence(**about | (evidence or {}))
    tier: Any = "oblivious" if declared else "adaptive"
    return open_case(seen, tier=tier, max_images=1, view=lambda *_: given)


def information(model: torch.nn.Module, centre: Tensor, label: int = 3) -> Tensor:
    """J^T J over all pixels, near one image of one label, by autograd."""
    parameters = {n: v.detach().double() for n, v in model.named_parameters()}

    def sent(image: Tensor) -> Tensor:
        found = grad(
            lambda p: F.cross_entropy(functional_call(model, p, (image,)), torch.tensor([label]))
        )(parameters)
        return torch.cat([value.flatten() for value in found.values()])

    jacobian: Tensor = jacfwd(sent)(centre).flatten(1)
    return jacobian.T @ jacobian


def centres() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(module.CENTRES):
        found.append(smooth_images(1, (1, SIDE, SIDE), generator).double())
        torch.randint(10, (1,), generator=generator)
    return found


def dense(model: torch.nn.Module, deviation: float) -> float:
    """The estimate over all pixels at once: one matrix of every pixel by every pixel."""
    mean = torch.stack([information(model, centre) for centre in centres()]).mean(dim=0)
    place = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
    apart = (place[:, None] - place[None]).abs().sum(dim=2)
    covariance = PIXEL_VARIANCE * (1 - NEIGHBOURS**2 / (2 * PIXEL_VARIANCE)) ** apart
    precision = mean / deviation**2 + torch.linalg.inv(covariance)
    return -10 * math.log10(float(torch.linalg.inv(precision).trace()) / SIDE**2)


@pytest.mark.parametrize("deviation", [1e-4, 1e-3, 1e-2])
def test_the_estimate_is_that_of_a_dense_computation(model: Any, deviation: float) -> None:
    case = opened(model, {"likelihood": GaussianLikelihood(deviation)})
    assert identifiability(case).psnr == pytest.approx(dense(model, deviation), abs=1e-3)


def test_the_label_of_a_certain_prediction_leaves_no_information_and_the_inferred_one_does() -> (
    None
):
    torch.manual_seed(0)
    sure = create_model("lenet-strided", classes=10, channels=1, image_size=SIDE)
    bias = [v for n, v in sure.named_parameters() if v.shape == (10,)][-1]
    with torch.no_grad():
        bias[3] += 12.0
    case = opened(sure, {"likelihood": GaussianLikelihood(1e-3), "labels": None})
    predicted, other = (
        identifiability(case, labels=torch.tensor([label])).psnr for label in (3, 5)
    )
    assert predicted == pytest.approx(PRIOR, abs=0.1)
    assert other > predicted + 1.0


def test_the_information_is_a_mean_over_images_and_not_of_the_first(model: Any) -> None:
    case = opened(model, {"likelihood": GaussianLikelihood(1e-3)})
    assert identifiability(case, seed=0).psnr != identifiability(case, seed=1).psnr
    first, second = (information(model, centre) for centre in centres()[:2])
    assert not torch.allclose(first, second, rtol=1e-2)


def test_fewer_axes_err_towards_the_attacker(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = opened(model, {"likelihood": GaussianLikelihood(1e-3)})
    whole = identifiability(case).psnr
    monkeypatch.setattr(module, "_DIRECTIONS", 8)
    assert identifiability(case).psnr > whole


def test_a_share_of_the_coordinates_stands_for_all(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = opened(model, {"likelihood": GaussianLikelihood(1e-3)})
    whole = identifiability(case)
    monkeypatch.setattr(module, "_HELD", whole.numbers * SIDE**2 // 2)
    assert identifiability(case).psnr == pytest.approx(whole.psnr, abs=1.0)


def test_laplace_noise_tells_as_gaussian_noise_of_less_deviation(model: Any) -> None:
    laplace = opened(model, {"likelihood": LaplaceLikelihood(1e-3 * math.sqrt(2.0))})
    gaussian = opened(model, {"likelihood": GaussianLikelihood(1e-3)})
    assert identifiability(laplace).psnr == pytest.approx(identifiability(gaussian).psnr)


def test_declared_noise_counts_for_whoever_ignores_it_too(model: Any) -> None:
    ignoring = opened(model, defenses=({"name": "noise", "std": 1e-3, "clip": None},))
    knowing = opened(model, {"likelihood": GaussianLikelihood(1e-3)})
    assert identifiability(ignoring).psnr == pytest.approx(identifiability(knowing).psnr)


def test_without_noise_the_numbers_alone_are_counted(model: Any) -> None:
    plain = identifiability(opened(model))
    assert plain.psnr == 100.0
    assert plain.prior_psnr == pytest.approx(PRIOR)
    assert plain.pixels == SIDE**2
    few = opened(model)
    for value in few.evidence.target.values():
        if value.numel() != 10:
            value.zero_()
    estimate = identifiability(few)
    assert estimate.numbers == 10
    assert PRIOR < estimate.psnr < 100.0


def test_noise_beyond_the_update_leaves_a_guess(model: Any) -> None:
    loud = opened(model, {"likelihood": GaussianLikelihood(1e3)})
    assert identifiability(loud).psnr == pytest.approx(PRIOR, abs=0.01)


def test_coordinates_known_within_bounds_tell_less(model: Any) -> None:
    target = opened(model).evidence.target
    tight, wide = (
        identifiability(
            opened(model, {"bounds": {n: torch.full_like(v, bound) for n, v in target.items()}})
        ).psnr
        for bound in (1e-4, 1e-2)
    )
    assert wide < tight
