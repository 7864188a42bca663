from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused

from bract.attacks import IG, Budget, Cosine, Known, Problem
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.problem.case import open_case
from bract.attacks.problem.objectives import RelativeError, SquaredError, SquaredPlusNorm
from bract.attacks.reading.errors import require_exact
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext, build_defenses
from bract.models import create_model
from bract.scores import psnr
from experiments.harness.bayes_reading import discount_noise, match_survivors
from experiments.harness.images import image_set


def defended(clean: Any, **entry: Any) -> Any:
    chain = build_defenses([entry])
    update = chain.protect(clean.update, {}, ProtectContext(seed=0))
    return replace(
        clean, update=update, declaration=replace(clean.declaration, defenses=tuple(chain.public()))
    )


def clipped(observe: Any, image: Any, label: Any, activation: str, std: float = 1e-9) -> Any:
    """What a client sends that clips to a third of its norm, with noise on top."""
    torch.manual_seed(0)
    model = create_model(
        "lenet-strided",
        classes=10,
        channels=image.shape[1],
        image_size=image.shape[2],
        activation=activation,
    )
    clean = observe(image, label, model=model, name="lenet-strided", activation=activation)
    norm = float(torch.cat([v.flatten() for v in clean.update.values()]).norm())
    return defended(clean, name="noise", std=std, clip=0.3 * norm)


@pytest.mark.parametrize("scope", ["whole", "tensor"])
def test_only_surviving_coordinates_are_trusted(observe: Any, digits: Any, scope: Any) -> None:
    seen = defended(observe(digits[0][:1], digits[1][:1]), name="pruning", ratio=0.7, scope=scope)
    found = match_survivors(seen, Known())
    assert found.weights is not None
    for name, value in seen.update.items():
        assert torch.equal(found.weights[name] == 1, value != 0)
    assert found.notes["surviving"] == pytest.approx(0.3, abs=0.01)


def test_fewer_zeros_than_declared_are_flagged(observe: Any, digits: Any) -> None:
    seen = defended(observe(digits[0][:1], digits[1][:1]), name="pruning", ratio=0.5)
    wrong = replace(seen.declaration, defenses=({"name": "pruning", "ratio": 0.9},))
    with refused("declaration-wrong", "0.9"):
        evidence_for(replace(seen, declaration=wrong), "adaptive")


def test_matching_survivors_beats_matching_zeros(observe: Any, digits: Any) -> None:
    images = digits[0][:1]
    seen = defended(observe(images, digits[1][:1], init="uniform"), name="pruning", ratio=0.9)
    scores = [
        float(psnr(IG()(seen, tier=tier, budget=Budget(iterations=150)).images, images)[0])
        for tier in ("oblivious", "adaptive")
    ]
    assert scores[1] > scores[0] + 3


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_who_knows_of_clipping_reads_off_what_who_does_not_know_reads_off(
    observe: Any, digits: Any, activation: str
) -> None:
    """Noise below the rounding of the update left closed forms and Gauss-Newton out."""
    images = digits[0][:1]
    seen = clipped(observe, images, digits[1][:1], activation)
    found = Best()(seen, tier="adaptive", budget=Budget(iterations=2))
    assert float(psnr(found.images, images)[0]) > 40
    loud = clipped(observe, images, digits[1][:1], activation, std=1e-3)
    case = open_case(loud, tier="adaptive", max_images=1, unroll=1)
    assert case.evidence.noisy
    with refused("attack-evidence", "r-gap"):
        require_exact(case, list(loud.update), "r-gap")


@pytest.mark.slow
def test_little_noise_that_is_known_leaves_the_prior_its_weight(observe: Any) -> None:
    """IG that knew of clipping lost 8 dB of photographs to IG that did not."""
    images = image_set("photos", 2, "choose").images
    scores = []
    for tier in ("oblivious", "adaptive"):
        each = []
        for one in images:
            seen = clipped(observe, one[None], torch.tensor([4]), "relu")
            found = IG()(seen, tier=tier, budget=Budget(iterations=200))
            each.append(float(psnr(found.images, one[None])[0]))
        scores.append(sum(each) / len(each))
    assert scores[1] > scores[0] - 1


@pytest.mark.parametrize(
    "objective", [Cosine(), SquaredError(), RelativeError(), SquaredPlusNorm()]
)
def test_objectives_do_not_see_coordinates_of_no_weight(
    observe: Any, digits: Any, objective: Any
) -> None:
    seen = defended(observe(digits[0][:1], digits[1][:1]), name="pruning", ratio=0.8)
    case = open_case(seen, tier="adaptive", max_images=1, unroll=1, view=match_survivors)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    simulated = {n: torch.randn(v.shape, generator=generator) for n, v in problem.target.items()}
    assert problem.weights is not None
    moved = {n: v + 5.0 * (problem.weights[n] == 0) for n, v in simulated.items()}
    before = problem.distance(objective, simulated)
    assert torch.allclose(before, problem.distance(objective, moved))
    moved = {n: v + 5.0 * (problem.weights[n] > 0) for n, v in simulated.items()}
    assert not torch.allclose(before, problem.distance(objective, moved))


def test_tensors_of_noise_are_trusted_less(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen = defended(clean, name="noise", std=1e-3, clip=None)
    found = discount_noise(seen, Known())
    assert found.weights is not None
    for name, value in clean.update.items():
        energy = float(value.double().square().mean())
        expected = energy / (energy + 1e-6)
        if value.numel() > 1000:
            assert float(found.weights[name].mean()) == pytest.approx(expected, abs=0.1)
    assert found.notes["deviation"] == 1e-3
    assert found.notes["clipped"].startswith("no")


def test_clipping_is_noticed_from_the_norm_and_the_scale_is_that_of_the_gradient(
    observe: Any, digits: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1], steps=1, lr=0.1)
    norm = float(torch.cat([v.flatten() for v in clean.update.values()]).norm())
    for factor, expected in ((0.5, "possibly"), (2.0, "no")):
        seen = defended(clean, name="noise", std=1e-4 * norm, clip=factor * norm)
        notes = discount_noise(seen, Known()).notes
        assert notes["clipped"].startswith(expected)
        assert notes["deviation"] == pytest.approx(1e-3 * norm)


def test_less_energy_than_the_declared_noise_is_flagged(observe: Any, digits: Any) -> None:
    seen = defended(observe(digits[0][:1], digits[1][:1]), name="noise", std=1e-3)
    wrong = replace(seen.declaration, defenses=({"name": "noise", "std": 10.0},))
    with refused("declaration-wrong", "noise"):
        evidence_for(replace(seen, declaration=wrong), "adaptive")


@pytest.mark.parametrize("steps", [None, 1])
def test_the_clipping_factor_of_one_image_is_read_off_the_last_layer(
    observe: Any, digits: Any, steps: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1], steps=steps)
    norm = float(torch.cat([v.flatten() for v in clean.update.values()]).norm())
    seen = defended(clean, name="noise", std=1e-7 * norm, clip=0.2 * norm)
    found = discount_noise(seen, Known())
    assert found.notes["factor"] == pytest.approx(5.0, rel=1e-3)
    assert not found.unknown_factor
    for name, value in clean.gradient().items():
        assert torch.allclose(found.target[name], value, rtol=1e-2, atol=1e-4 * norm)


def test_a_factor_that_noise_hides_stays_open(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    norm = float(torch.cat([v.flatten() for v in clean.update.values()]).norm())
    found = discount_noise(defended(clean, name="noise", std=0.01 * norm, clip=0.2 * norm), Known())
    assert found.unknown_factor
    assert found.notes["factor"] is None


def test_a_norm_above_the_declared_clipping_is_flagged(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen = defended(clean, name="noise", std=1e-4, clip=None)
    wrong = replace(seen.declaration, defenses=({"name": "noise", "std": 1e-4, "clip": 0.1},))
    with refused("declaration-wrong", "0.1", "declaration"):
        evidence_for(replace(seen, declaration=wrong), "adaptive")
