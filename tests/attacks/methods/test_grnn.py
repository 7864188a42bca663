from typing import Any

import pytest
import torch
from observing import scores
from refusals import refused

from bract.attacks import GRNN, IG, Budget, Engine, Problem, Reconstruction, reconstruct
from bract.attacks.methods.grnn.generator import Generator, GeneratorSearch
from bract.attacks.methods.grnn.grnn_polish import GRNNPolish
from bract.attacks.methods.portfolio.best import Best
from bract.attacks.problem.case import open_case
from bract.scores.image import label_accuracy
from bract_papers.dlg import DLG


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_generator_makes_images_of_every_power_of_two(size: Any, channels: Any) -> None:
    network = Generator(size=size, channels=channels, classes=7, latent=8, width=2)
    images, labels = network(torch.randn(2, 8))
    assert images.shape == (2, channels, size, size)
    assert images.min() >= 0
    assert images.max() <= 1
    assert labels.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])


def test_the_generator_for_32_pixels_has_the_papers_layers() -> None:
    network = Generator(size=32, channels=3, classes=10)
    assert network.seed.weight.shape == (128, 256, 4, 4)
    blocks: list[Any] = list(network.blocks)
    shapes = [tuple(block.conv.weight.shape) for block in blocks]
    assert shapes == [(128, 128, 3, 3), (64, 64, 3, 3), (6, 32, 3, 3)]
    assert all(block.conv.bias is None for block in blocks)


@pytest.mark.parametrize("size", [4, 24, 512])
def test_other_sizes_are_refused(size: Any) -> None:
    with refused("attack-unsuited", size):
        Generator(size=size, channels=1, classes=10)


def test_one_digit_and_its_label_are_recovered(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    found = GRNN()(observe(images, labels), budget=Budget(iterations=250))
    assert found.labels.tolist() == labels.tolist()
    assert scores(found.images, images)[0].psnr > 20


def test_a_batch_is_recovered_with_one_latent_an_image(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:3], tiny[1][:3]
    found = GRNN()(observe(images, labels), budget=Budget(iterations=250))
    assert label_accuracy(found.labels, labels) == 1.0
    assert min(row.ssim for row in scores(found.images, images)) > 0.5


def test_trials_train_as_they_train_alone(observe: Any, tiny: Any) -> None:
    seen = [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(3)]
    budget = Budget(iterations=3)
    together = reconstruct(seen, GRNN(width=4), budget=budget, engine=Engine(trials=3))
    alone = reconstruct(seen, GRNN(width=4), budget=budget, engine=Engine(trials=1))
    for one, other in zip(together, alone, strict=True):
        assert isinstance(other, Reconstruction)
        assert isinstance(one, Reconstruction)
        assert torch.allclose(one.images, other.images, atol=1e-3)


def test_the_polish_improves_on_grnn(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    seen, budget = observe(images, labels), Budget(iterations=60)
    rough = scores(GRNN()(seen, budget=budget).images, images)[0].psnr
    polished = GRNNPolish()(seen, budget=budget)
    assert scores(polished.images, images)[0].psnr > rough + 10
    assert polished.final_loss < 1e-9


def test_beyond_max_unknowns_the_polish_is_lbfgs_and_still_improves(
    observe: Any, tiny: Any
) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    seen, budget = observe(images, labels), Budget(iterations=60)
    rough = GRNN()(seen, budget=budget)
    polished = GRNNPolish(max_unknowns=1)(seen, budget=budget)
    assert polished.gradient_residual is not None and rough.gradient_residual is not None
    assert polished.gradient_residual < 0.5 * rough.gradient_residual


@pytest.mark.parametrize("images", [1, 3])
def test_every_trial_decodes_as_its_own_generator_would(
    observe: Any, tiny: Any, images: Any
) -> None:
    cases = [
        open_case(
            observe(tiny[0][:images], tiny[1][:images]), tier="oblivious", max_images=8, unroll=16
        )
    ] * 2
    trials = [(case, restart) for restart, case in enumerate(cases)]
    problem = Problem.stack(trials, seed=0, device=torch.device("cpu"))
    found, labels = GeneratorSearch(problem, latent=8, width=4).decode()
    for trial, generator in enumerate(problem.generators()):
        seed = int(torch.randint(2**62, (1,), generator=generator))
        torch.manual_seed(seed)
        network = Generator(size=8, channels=1, classes=10, latent=8, width=4)
        wanted, probabilities = network(torch.randn(images, 8))
        assert torch.allclose(found[trial], wanted, atol=1e-5)
        assert torch.allclose(labels[trial], probabilities, atol=1e-6)


def test_a_whole_attack_runs_at_256_pixels(observe: Any) -> None:
    images = torch.rand(1, 3, 256, 256)
    found = GRNN(width=1, latent=4)(observe(images, torch.tensor([1])), budget=Budget(iterations=1))
    assert found.images.shape == (1, 3, 256, 256)


def test_images_of_odd_size_are_left_to_the_attacks_without_a_generator(observe: Any) -> None:
    images, labels = torch.rand(1, 1, 9, 9), torch.tensor([2])
    seen = observe(images, labels)
    for attack in (IG(), DLG(), Best()):
        found = attack(seen, budget=Budget(iterations=2))
        assert found.images.shape == images.shape
    with refused("attack-unsuited", 9):
        GRNN()(seen, budget=Budget(iterations=2))
