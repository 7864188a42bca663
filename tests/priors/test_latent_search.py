"""GGL and GIAS: attackers who trained a generator on public images."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pack
import pytest
import torch
from defended_clients import capture
from observing import observed as observe
from refusals import check_refusal, refused
from torch import Tensor

from bract.attacks import Budget, Known, Outcome, Problem, Reconstruction, reconstruct
from bract.attacks.adaptive.adadefense.forward import AdaDefenseClient
from bract.attacks.problem.case import open_case
from bract.attacks.problem.evidence import FORWARD
from bract.attacks.solve.regularizers import LatentPrior
from bract.client.defenses import ProtectContext, build_defenses
from bract.scores import psnr
from bract_priors import evolution
from bract_priors.ggl import GGL
from bract_priors.gias import GIAS
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior


@pytest.fixture(scope="module")
def prior() -> TrainedPrior:
    """A generator of 8-pixel digits; the attacked ones are of the other split."""
    return pack.prior("autoencoder")


@pytest.mark.thorough
def test_an_attacker_with_public_images_gets_more_than_those_give(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    images, labels = tiny[0][:3], tiny[1][:3]
    assert not prior.trained_on(images).any()
    seen = [observe(images[i : i + 1], labels[i : i + 1], client=f"c{i}") for i in range(3)]
    found: dict[str, list[Tensor]] = {}
    for attack, steps in ((GGL(), 30), (GGL(search="adam"), 60), (GIAS(), 120)):
        results = reconstruct(
            seen, attack, budget=Budget(iterations=steps), tier="surrogate", public=prior
        )
        name = f"{attack.name} {attack.search}"
        assert all(isinstance(r, Reconstruction) for r in results)
        found[name] = [r.images for r in results if isinstance(r, Reconstruction)]
        for result in results:
            assert isinstance(result, Reconstruction)
            assert "trained generator" in result.components
            assert ("CMA-ES" in result.components) == (attack.search == "cma")
            assert not result.unknowns
            assert result.settings["surrogate"] == prior.text
    scores = {name: float(psnr(torch.cat(made), images).mean()) for name, made in found.items()}
    floor = float(psnr(prior.sample(labels.tolist(), seed=1), images).mean())
    assert min(scores["ggl cma"], scores["ggl adam"]) > floor + 2, (scores, floor)
    assert scores["gias adam"] > scores["ggl adam"] + 3, scores


def test_without_public_images_or_with_others_the_attack_is_refused(
    prior: TrainedPrior, digits: tuple[Tensor, Tensor]
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    for name in ("ggl", "gias"):
        (found,) = reconstruct(seen, name)
        check_refusal(found, "prior-unsuited", "bract prior train")
        (found,) = reconstruct(seen, name, public=prior)
        check_refusal(found, "prior-unsuited", "(1, 8, 8)", "(1, 16, 16)")


def test_a_generator_without_classes_is_not_told_labels(tiny: tuple[Tensor, Tensor]) -> None:
    bare = train_prior(tiny[0], None, PriorSettings(latent=4, width=2, epochs=1), source="digits")
    seen = observe(tiny[0][:1], tiny[1][:1])
    (found,) = reconstruct(seen, "gias", budget=Budget(iterations=4), public=bare)
    assert isinstance(found, Reconstruction) and found.labels.tolist() == tiny[1][:1].tolist()


def defended(entry: dict[str, Any], tiny: tuple[Tensor, Tensor]) -> Any:
    return capture(tiny[0][:1], tiny[1][:1], entry, model="lenet-strided")


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "adadefense"},
        {"name": "adadefense", "eps_placement": "outside", "alpha_at": "server"},
        {"name": "pruning", "ratio": 0.9},
    ],
)
def test_the_true_image_through_the_simulated_defense_is_the_upload(
    entry: dict[str, Any], tiny: tuple[Tensor, Tensor]
) -> None:
    held = defended(entry, tiny)
    case = open_case(held.seen, tier="surrogate", max_images=1, view=FORWARD[entry["name"]])
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    one_hot = torch.nn.functional.one_hot(held.labels, 10).float()[None]
    made = problem.simulate(held.images[None], one_hot, {})
    flat, wanted = (
        torch.cat([t[n].flatten() for n in problem.target]) for t in (made, problem.target)
    )
    assert float(torch.nn.functional.cosine_similarity(flat, wanted, dim=0)) > 0.999
    assert float((flat - wanted).abs().median()) < 1e-5 * float(wanted.abs().max())


def test_moments_of_earlier_rounds_are_replayed(tiny: tuple[Tensor, Tensor]) -> None:
    held = defended({"name": "adadefense"}, tiny)
    later = replace(held.seen, round=2)
    one = FORWARD["adadefense"](held.seen, Known())
    two = FORWARD["adadefense"](later, Known(history=(held.seen,)))
    assert not any(v.any() for v in one.buffers.values() if v.numel() and v.abs().max() > 1e-7)
    carried = [v for n, v in two.buffers.items() if n.startswith("adadefense.carried.")]
    assert sum(float(v.abs().sum()) for v in carried) > 0
    assert two.notes["captured_rounds"] == [1, 2]


def test_the_defense_is_simulated_for_who_knows_it_only(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    seen = defended({"name": "adadefense"}, tiny).seen
    budget = Budget(iterations=3)
    for attack, tier, said in (
        (GGL(), "surrogate", "applied the defense to candidates"),
        (GGL(defense="undo"), "surrogate", "inverted the defended update"),
        (GIAS(), "surrogate", "inverted the defended update"),
        (GIAS(defense="simulate"), "surrogate", "applied the defense to candidates"),
    ):
        (found,) = reconstruct(seen, attack, budget=budget, tier=tier, public=prior)  # type: ignore[arg-type]
        assert isinstance(found, Reconstruction)
        assert said in found.settings["evidence"]["method"]
    (found,) = reconstruct(seen, GGL(), budget=budget, tier="oblivious", public=prior)
    assert isinstance(found, Reconstruction) and not found.settings["evidence"]


@pytest.mark.parametrize(("least", "said"), [(1.1, "applied the defense"), (0.0, "inverted the")])
def test_gias_simulates_adadefense_where_float32_does_not_resolve_its_upload(
    prior: TrainedPrior,
    tiny: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    least: float,
    said: str,
) -> None:
    monkeypatch.setattr("bract_priors.ggl._RESOLVED", least)
    seen = defended({"name": "adadefense", "eps_placement": "outside"}, tiny).seen
    budget = Budget(iterations=100)
    (found,) = reconstruct(seen, GIAS(), budget=budget, tier="surrogate", public=prior)
    assert isinstance(found, Reconstruction) and found.labels.tolist() == tiny[1][:1].tolist()
    assert said in found.settings["evidence"]["method"]
    if least:
        sample = prior.sample(tiny[1][:1].tolist(), seed=1)
        assert float(psnr(found.images, tiny[0][:1])) > float(psnr(sample, tiny[0][:1])) + 3


def test_the_simulated_defense_has_its_own_values_and_a_smoother_derivative() -> None:
    def client(*_: Any) -> Any:
        return {"w": given}

    given = torch.tensor([[3.0, -4.0]], requires_grad=True)
    made = AdaDefenseClient(client=client, a1=0.1, c=1.0, e=1.0, scale=1.0)  # type: ignore[arg-type]
    zero = torch.zeros(1, 2)
    held = {"adadefense.carried.w": zero, "adadefense.second.w": zero}
    found = made(None, {}, held, zero, zero, {})["w"]  # type: ignore[arg-type]
    # 0.1 g / (|g| + 1)
    assert found.tolist()[0] == pytest.approx([0.3 / 4, -0.4 / 5])
    (slope,) = torch.autograd.grad(found[0, 0], given)
    # With 0.01 (9 + 16) / 2 = 0.125 under the root q: 0.1 (q + 1 - g^2 / q) / (q + 1)^2 at g = 3.
    q = math.sqrt(9.125)
    assert slope[0, 0] == pytest.approx(0.1 * (q + 1 - 9 / q) / (q + 1) ** 2)
    assert slope[0, 1] == 0.0


def test_the_label_of_a_later_round_is_read_off_the_inverted_upload(
    tiny: tuple[Tensor, Tensor],
) -> None:
    hyper = {"name": "adadefense", "eps_placement": "outside"}
    first = defended(hyper, tiny)
    second = capture(tiny[0][1:2], tiny[1][1:2], hyper, model="lenet-strided").seen
    assert int(tiny[1][0]) != int(tiny[1][1])
    chain = build_defenses([hyper])
    state: dict[str, Tensor] = {}
    sent = []
    for held, label in ((first.seen, 0), (second, 1)):
        image, kind = tiny[0][label : label + 1], tiny[1][label : label + 1]
        plain = capture(image, kind, {"name": "noise", "std": 1e-12}, model="lenet-strided").seen
        update = chain.protect(plain.update, state, ProtectContext(round=1 + label))
        sent.append(replace(held, round=1 + label, update=update))
    found = FORWARD["adadefense"](sent[1], Known(history=sent[:1]))
    assert found.labels is not None and found.labels.tolist() == [int(tiny[1][1])]


def quadratic(search: evolution.CMAES, variable: Tensor, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):

        def evaluate() -> Tensor:
            losses.append((variable - 1.0).square().sum(dim=1))
            return losses[-1]

        search.step(evaluate, 0.0)
    return losses


def test_cma_finds_the_bottom_without_derivatives_and_goes_on_where_it_stopped() -> None:
    population = evolution.population_of(4)
    assert population == 4 + 4  # 3 ln 4 = 4.16
    before = str(np.random.get_state())
    start = torch.zeros(2, 4)

    def begun() -> tuple[evolution.CMAES, Tensor]:
        variable = torch.zeros(2 * population, 4)
        return evolution.CMAES(variable, start, sigma=0.5, seeds=[1, 2]), variable

    search, variable = begun()
    losses = quadratic(search, variable, 60)
    assert float(losses[-1].max()) < 1e-4 < float(losses[0].min())
    again, other = begun()
    quadratic(again, other, 20)
    resumed, third = begun()
    resumed.restore(again.state())
    rest = quadratic(resumed, third, 40)
    assert torch.equal(rest[-1], losses[-1])
    assert str(np.random.get_state()) == before
    assert search.derivative_free


def test_each_trials_best_candidate_comes_back() -> None:
    losses = torch.tensor([3.0, 1.0, 2.0, 5.0, 6.0, 4.0])
    values = torch.arange(6.0)[:, None]
    wide = Outcome(values, values, losses, {"x": values}, [[(0, float(v))] for v in losses], 1)
    found = evolution.narrowed(wide, 3)
    assert found.losses.tolist() == [1.0, 4.0]
    assert found.images[:, 0].tolist() == [1.0, 5.0] == found.unknowns["x"][:, 0].tolist()
    assert found.curves == [[(0, 1.0)], [(0, 4.0)]]


def test_the_latents_prior_is_zero_for_a_standard_normal_and_in_nats_beside_a_likelihood() -> None:
    latent = torch.tensor([[[1.0, -1.0]], [[3.0, 1.0]]])
    images = torch.zeros(2, 1, 1, 2, 2)
    divergence = LatentPrior(latent=latent, weight=2.0)
    # mean 0, variance 1; mean 2, variance 1: (4 + 1 - 0 - 1) / 2 = 2, twice.
    assert divergence(None, images).tolist() == pytest.approx([0.0, 4.0])  # type: ignore[arg-type]
    nats = LatentPrior(latent=latent, weight=1.0, kind="normal")
    assert nats(None, images).tolist() == pytest.approx([1.0, 5.0])  # type: ignore[arg-type]


def test_cma_refuses_unknowns_that_need_a_gradient(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    with refused("prior-unsuited", "public"):
        GGL()(seen)
    monkeypatch.setattr(Problem, "unknowns", lambda self: {"gamma": torch.ones(self.trials, 1)})
    monkeypatch.setattr(Problem, "simulate", lambda self, *_: self.target)
    (found,) = reconstruct(seen, GGL(), public=prior)
    check_refusal(found, "attack-unsuited", "gias")


@pytest.mark.thorough
def test_against_noise_gias_leaves_the_generator_as_it_is(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    seen = defended({"name": "noise", "std": 1e-2}, tiny).seen
    budget = Budget(iterations=4)
    (found,) = reconstruct(seen, GIAS(), budget=budget, tier="surrogate", public=prior)
    assert isinstance(found, Reconstruction) and "latent prior in nats" in found.components
    assert "generator weights" not in found.components
    assert found.final_loss == pytest.approx(found.loss_curve[-1][1])
