from typing import Any

import pytest
import torch
from scipy.stats import laplace, norm

from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.over_rounds import SumOverRounds
from bract.attacks.solve.regularizers import (
    MEAN_DIFFERENCE,
    ROOT_MEAN_SQUARE_DIFFERENCE,
    NaturalImages,
    TotalVariation,
    natural_images,
)

SIGMA = 0.3


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(2, 3, 4, generator=generator, dtype=torch.float64),
        "b": torch.randn(2, 5, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("likelihood", "law"),
    [
        (GaussianLikelihood(SIGMA), norm(scale=SIGMA)),
        (LaplaceLikelihood(SIGMA), laplace(scale=SIGMA / 2**0.5)),
    ],
)
def test_likelihoods_are_scipys_up_to_a_constant(likelihood: Any, law: Any) -> None:
    assert law.std() == pytest.approx(SIGMA)
    upload, one, other = (tensors(seed) for seed in range(3))

    def wanted(means: dict[str, torch.Tensor], trial: int) -> float:
        return -sum(
            float(law.logpdf((upload[n][trial] - means[n][trial]).numpy()).sum()) for n in means
        )

    found = likelihood(one, upload, None) - likelihood(other, upload, None)
    for trial in range(2):
        assert float(found[trial]) == pytest.approx(wanted(one, trial) - wanted(other, trial))


@pytest.mark.parametrize("kind", [GaussianLikelihood, LaplaceLikelihood])
def test_a_tempered_law_is_that_of_a_share_of_what_was_captured(kind: Any) -> None:
    upload, simulated = tensors(0), tensors(1)
    assert torch.equal(
        kind(0.5).tempered()(simulated, upload, None), kind(0.5)(simulated, upload, None)
    )
    found = kind(1e-6).tempered()(simulated, upload, None)
    for trial in range(2):
        size = torch.cat([upload[n][trial].flatten() for n in upload]).square().mean().sqrt()
        wanted = kind(0.2 * float(size))(simulated, upload, None)[trial]
        assert float(found[trial]) == pytest.approx(float(wanted))
    rounds = SumOverRounds((kind(1e-6), kind(0.5)))
    assert rounds.tempered().parts == (kind(1e-6).tempered(), kind(0.5).tempered())


def test_the_prior_of_an_image_that_is_not_square_counts_its_differences() -> None:
    """Of 3 x 3 pixels eight are free, with six differences down and six right."""
    square = NaturalImages().weight(torch.zeros(1, 1, 1, 3, 3))
    assert square == pytest.approx(8 / 12 * 6 / MEAN_DIFFERENCE)
    wide = torch.zeros(1, 2, 1, 2, 4)
    # Seven free values of 2 x 4 pixels with 4 differences down and 6 right; of two images twice.
    assert NaturalImages().weight(wide) == pytest.approx(2 * 7 / 10 * 5 / MEAN_DIFFERENCE)


@pytest.mark.parametrize(
    ("power", "law"),
    [(1, laplace(scale=MEAN_DIFFERENCE)), (2, norm(scale=ROOT_MEAN_SQUARE_DIFFERENCE))],
)
def test_the_prior_is_scipys_density_of_differences_by_the_share_that_is_free(
    power: Any, law: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 1, 6, 6, generator=generator, dtype=torch.float64)
    problem: Any = None
    found = NaturalImages(power=power)(problem, images)

    def wanted(trial: int) -> float:
        x = images[trial].numpy()
        steps = (x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1])
        return -sum(float(law.logpdf(step).sum()) for step in steps)

    share = (6 * 6 - 1) / (2 * 6 * 5)
    assert float(found[0] - found[1]) == pytest.approx(share * (wanted(0) - wanted(1)))


def test_total_variation_of_power_2_has_the_normalisation_that_the_scale_is_taken_from() -> None:
    # exp(-gamma sum dx^2) is Gaussian with precision 2 gamma times the graph's Laplacian, whose
    # one zero eigenvalue is the level: log Z = -(d / 2) log gamma + const with d = H^2 - 1.
    side = 5
    path = torch.diag(torch.tensor([1.0, 2, 2, 2, 1])) - (
        torch.diag(torch.ones(side - 1), 1) + torch.diag(torch.ones(side - 1), -1)
    )
    eye = torch.eye(side)
    laplacian = torch.kron(path, eye) + torch.kron(eye, path)
    values = torch.linalg.eigvalsh(laplacian.double())
    free = int((values > 1e-6).sum())
    assert free == side**2 - 1
    # Under that density the mean of 2 gamma x' L x is d, so the mean square step gives gamma.
    gamma = (free / (2 * side * (side - 1))) / (2 * ROOT_MEAN_SQUARE_DIFFERENCE**2)
    mean_square = float((values[values > 1e-6] / (2 * gamma * values[values > 1e-6])).sum())
    assert mean_square / (2 * side * (side - 1)) == pytest.approx(ROOT_MEAN_SQUARE_DIFFERENCE**2)
    images = torch.rand(1, 1, 1, side, side, generator=torch.Generator().manual_seed(0))
    flat = images.flatten().double()
    problem: Any = None
    assert float(NaturalImages(power=2)(problem, images)) == pytest.approx(
        float(gamma * (flat @ laplacian.double() @ flat)), rel=1e-5
    )


def test_the_weight_of_total_variation_follows_from_sigma() -> None:
    images = torch.rand(1, 2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    upload, simulated = ({"a": v} for v in torch.randn(2, 1, 7))
    count = 2 * 3 * (5 * 5 - 1) / 2
    problem: Any = None
    for power, per_nat in (
        (1, 1.0 / MEAN_DIFFERENCE),
        (2, 0.5 / ROOT_MEAN_SQUARE_DIFFERENCE**2),
    ):
        posterior = GaussianLikelihood(SIGMA)(simulated, upload, None)
        posterior = posterior + NaturalImages(power=power)(problem, images)
        weight = 2.0 * SIGMA**2 * count * per_nat
        square = (simulated["a"] - upload["a"]).square().sum()
        loss = square + TotalVariation(weight=weight, power=power)(problem, images)
        assert float(loss) == pytest.approx(float(2.0 * SIGMA**2 * posterior), rel=1e-5)


def test_the_prior_in_nats_has_the_power_of_the_attacks_own() -> None:
    assert natural_images([]) == NaturalImages(power=1)
    assert natural_images([TotalVariation(weight=3.0, power=2)]) == NaturalImages(power=2)
