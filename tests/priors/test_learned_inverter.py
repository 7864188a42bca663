"""Learning to invert: a network from updates to latents, and what it is trained on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pack
import pytest
import torch
from defended_clients import capture
from observing import observed as observe
from refusals import check_refusal
from torch import Tensor

from bract import Observation
from bract.attacks import Budget, Engine, Problem, Reconstruction, Run, reconstruct
from bract.attacks.problem.case import open_case
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.over_rounds import name_in
from bract.scores import psnr
from bract_priors import inverter
from bract_priors.inverter import InverterSettings, InverterTraining
from bract_priors.learned_inverter import LearnedInverter
from bract_priors.sketch import Sketch
from bract_priors.trained_prior import TrainedPrior


@pytest.fixture(scope="module")
def prior() -> TrainedPrior:
    """A generator of 8-pixel digits; the attacked ones are of the other split."""
    return pack.prior("autoencoder")


def with_noise(std: float, tiny: tuple[Tensor, Tensor]) -> Observation:
    """One digit's update with noise of a known deviation."""
    entry = {"name": "noise", "std": std}
    return capture(tiny[0][:1], tiny[1][:1], entry, model="lenet-strided").seen


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverter, "_trained", inverter._trained.__class__())


def problem_of(seen: Any, *, restart: int = 0, prior: TrainedPrior | None = None) -> Problem:
    case = open_case(seen, tier="surrogate", max_images=8, public=prior)
    return Problem.stack([(case, restart)], seed=3, device=torch.device("cpu"))


@pytest.mark.slow
def test_a_prediction_is_nearer_than_a_sample_and_a_search_from_it_nearer_still(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    images, labels = tiny[0][:4], tiny[1][:4]
    seen = [observe(images[i : i + 1], labels[i : i + 1], client=f"c{i}") for i in range(4)]
    scores = {}
    for finish, steps in (("none", 150), ("latent", 200), ("weights", 250)):
        attack = LearnedInverter(finish=finish, width=64)  # type: ignore[arg-type]
        found = reconstruct(seen, attack, budget=Budget(iterations=steps), public=prior)
        assert all(isinstance(r, Reconstruction) for r in found)
        made = [r for r in found if isinstance(r, Reconstruction)]
        scores[finish] = float(psnr(torch.cat([r.images for r in made]), images).mean())
        for result in made:
            assert "learned inverter" in result.components and result.iterations == steps
            assert ("generator weights" in result.components) == (finish == "weights")
            assert math.isclose(result.final_loss, result.loss_curve[-1][1])
    floor = float(psnr(prior.sample(labels.tolist(), seed=1), images).mean())
    assert scores["none"] > floor + 0.5, (scores, floor)
    assert scores["weights"] > scores["none"] + 2, scores


def test_uploads_of_one_model_share_one_inverter_and_the_result_is_each_ones_own(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Run] = []
    whole = InverterTraining.run

    def counted(self: InverterTraining, run: Run) -> int:
        trained.append(run)
        return whole(self, run)

    monkeypatch.setattr(InverterTraining, "run", counted)
    seen = [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(3)]
    seen[2] = replace(seen[2], parameters={n: 0.9 * v for n, v in seen[2].parameters.items()})
    attack, budget = LearnedInverter(finish="none", width=16), Budget(iterations=3)
    many = reconstruct(seen, attack, budget=budget, public=prior)
    assert len(trained) == 2
    reconstruct(seen[:1], attack, budget=budget, public=prior)
    assert len(trained) == 2
    inverter._trained.clear()
    for number, one in enumerate(seen):
        (alone,) = reconstruct([one], attack, budget=budget, public=prior)
        beside = many[number]
        assert isinstance(alone, Reconstruction) and isinstance(beside, Reconstruction)
        assert torch.allclose(alone.images, beside.images, atol=1e-4)
    (other,) = reconstruct(seen[:1], attack, budget=budget, public=prior, seed=1)
    assert isinstance(other, Reconstruction) and isinstance(many[0], Reconstruction)
    assert not torch.allclose(other.images, many[0].images, atol=1e-4)


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_words_of_a_declaration(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, budget = LearnedInverter(finish="none", width=16), Budget(iterations=3)
    seen = observe(tiny[0][:1], tiny[1][:1])
    (one,) = reconstruct([seen], attack, budget=budget, public=prior)
    monkeypatch.setattr(inverter, "_identity", lambda *_: "0" * 16)
    (two,) = reconstruct([seen], attack, budget=budget, public=prior)
    assert isinstance(one, Reconstruction) and isinstance(two, Reconstruction)
    assert torch.equal(one.images, two.images)


def test_a_training_that_was_interrupted_goes_on_where_it_stopped(
    prior: TrainedPrior,
    tiny: tuple[Tensor, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inverter, "_CHECKPOINT_SECONDS", -1.0)
    problem = problem_of(observe(tiny[0][:1], tiny[1][:1]), prior=prior)
    settings = InverterSettings(features=64, width=8, pairs=4)
    steps: list[float] = []

    def training(report: Any, path: Path | None) -> InverterTraining:
        made = InverterTraining(problem, prior, settings, 5)
        made.run(Run(iterations=6, report=report, checkpoint=path))
        return made

    def stop(share: float, loss: float) -> None:
        steps.append(share)
        if len(steps) == 4:
            raise KeyboardInterrupt

    whole = training(None, None)
    with pytest.raises(KeyboardInterrupt):
        training(stop, tmp_path / "a.inverter")
    rest: list[float] = []
    again = training(lambda share, loss: rest.append(share), tmp_path / "a.inverter")
    assert rest[0] == 0.5  # the fourth step was not kept
    for one, two in zip(whole.inverter.parameters(), again.inverter.parameters(), strict=True):
        assert torch.equal(one, two)
    done: list[float] = []
    training(lambda share, loss: done.append(share), tmp_path / "a.inverter")
    assert not done


def test_with_a_bucket_each_a_sketch_is_the_signed_update_over_its_norm(
    tiny: tuple[Tensor, Tensor],
) -> None:
    problem = problem_of(observe(tiny[0][:1], tiny[1][:1]))
    target = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[[-4.0]]])}
    weights = {"b": torch.tensor([[[0.25]]])}
    small = replace(problem, target=target)
    found = Sketch(small, length=8, seed=0)(small, target)
    assert found.abs().tolist()[0] == pytest.approx([0.6, 0.0, 0.8, math.log(5.0)])
    # Trust enters by its root: (3, 0, -4 / 2), of norm sqrt(13).
    trusted = replace(small, weights=weights)
    found = Sketch(trusted, length=8, seed=0)(trusted, target)
    root = math.sqrt(13.0)
    assert found.abs().tolist()[0] == pytest.approx([3 / root, 0.0, 2 / root, math.log(root)])
    # What lies along a direction that is not known does not count: (3, 0, -4) less 3 (1, 0, 0).
    along = {"a": torch.tensor([[[1.0, 0.0]]]), "b": torch.zeros(1, 1, 1, 1)}
    blind = replace(small, nuisance=along)
    found = Sketch(blind, length=8, seed=0)(blind, target)
    assert found.abs().tolist()[0] == pytest.approx([0.0, 0.0, 1.0, math.log(4.0)])


def test_a_short_sketch_keeps_inner_products_in_the_mean(tiny: tuple[Tensor, Tensor]) -> None:
    problem = problem_of(observe(tiny[0][:1], tiny[1][:1]))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 500, generator=generator)
    rows[1] += rows[0]
    rows = rows / rows.norm(dim=1, keepdim=True)
    wanted = float(rows[0] @ rows[1])
    small = replace(problem, target={"a": rows[:1]})
    found = []
    for seed in range(100):
        sketch = Sketch(small, length=50, seed=seed)
        # The scale of a bucket makes a sketch as long as the update in the mean over buckets.
        one, two = sketch(small, {"a": rows})[:, :-1] / math.sqrt(50 / 500)
        found.append(float(one @ two))
    spread = torch.tensor(found).std() / 10
    assert abs(sum(found) / 100 - wanted) < 4 * float(spread)
    assert float(spread) < 0.03


def test_noise_is_drawn_with_the_declared_deviation() -> None:
    like = torch.zeros(200_000)
    for law, fourth in ((GaussianLikelihood(0.3), 3.0), (LaplaceLikelihood(0.3), 6.0)):
        drawn = law.draw(like, torch.Generator().manual_seed(0)) / 0.3
        assert float(drawn.square().mean()) == pytest.approx(1.0, abs=0.03)
        assert float(drawn.pow(4).mean()) == pytest.approx(fourth, rel=0.1)
        assert abs(float(drawn.mean())) < 0.01


def drawn_noise(training: InverterTraining, name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Deviation of what is added to one tensor of simulated updates."""

    def sent() -> Tensor:
        latents, labels, parts = training._pairs("pairs", 1, 64)
        assert latents.shape == (64, 1, 8) and labels.shape == (64, 1, 10)
        return torch.cat([part[name] for _, part in parts])

    noisy = sent()
    with monkeypatch.context() as patch:
        patch.setattr(inverter, "_noise", lambda law, name, like, generator: 0.0 * like)
        return float((noisy - sent()).std())


@pytest.mark.thorough
def test_pairs_of_a_noisy_client_are_noisy(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = with_noise(1e-2, tiny)
    problem = problem_of(seen, prior=prior)
    training = InverterTraining(problem, prior, InverterSettings(features=64, width=8), 5)
    found = drawn_noise(training, "classifier.1.weight", monkeypatch)
    assert found == pytest.approx(1e-2, rel=0.02)


def test_images_of_one_label_are_learned_in_their_best_order() -> None:
    labels = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    latents = torch.tensor([[[1.0], [2.0], [3.0]]])
    found = torch.tensor([[[2.1], [0.9], [1.0]]])
    ordered = inverter._in_order(found, latents, labels)
    assert ordered.flatten().tolist() == [2.0, 1.0, 3.0]


def test_a_batch_has_one_latent_an_image(prior: TrainedPrior, tiny: tuple[Tensor, Tensor]) -> None:
    seen = observe(tiny[0][:3], tiny[1][:3])
    attack = LearnedInverter(width=16, pairs=8)
    (found,) = reconstruct(seen, attack, budget=Budget(iterations=10), public=prior)
    assert isinstance(found, Reconstruction) and found.images.shape == (3, 1, 8, 8)
    assert float((found.images[0] - found.images[1]).abs().max()) > 0.01


def test_unknowns_of_the_client_are_refused(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Problem, "unknowns", lambda self: {"gamma": torch.ones(self.trials, 1)})
    (found,) = reconstruct(
        observe(tiny[0][:1], tiny[1][:1]), LearnedInverter(), public=prior, device="cpu"
    )
    check_refusal(found, "attack-unsuited", "gias")
    (found,) = reconstruct(observe(tiny[0][:1], tiny[1][:1]), LearnedInverter())
    check_refusal(found, "prior-unsuited", "bract prior train")


@pytest.mark.thorough
def test_pairs_of_several_noisy_rounds_are_noisy(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = []
    for number, std in ((1, 1e-2), (2, 3e-2)):
        seen = replace(with_noise(std, tiny), round=number)
        cases.append(open_case(seen, tier="surrogate", max_images=8, public=prior))
    problem = Problem.stack([(join_rounds(cases), 0)], seed=3, device=torch.device("cpu"))
    training = InverterTraining(problem, prior, InverterSettings(features=64, width=8), 5)
    for number, std in enumerate((1e-2, 3e-2)):
        found = drawn_noise(training, name_in(number, "classifier.1.weight"), monkeypatch)
        assert found == pytest.approx(std, rel=0.02)


def test_another_number_of_steps_is_another_training(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    attack = LearnedInverter(finish="none", width=16, pairs=8)

    def found(steps: int, folder: Path) -> Tensor:
        inverter._trained.clear()
        engine = Engine(checkpoint=folder)
        (result,) = reconstruct(
            seen, attack, budget=Budget(iterations=steps), public=prior, engine=engine
        )
        assert isinstance(result, Reconstruction)
        return result.images

    found(9, tmp_path / "kept")
    assert torch.equal(found(4, tmp_path / "kept"), found(4, tmp_path / "fresh"))
