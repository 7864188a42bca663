from dataclasses import replace
from typing import Any

import pytest
import torch
from defended_clients import capture

from bract.attacks import GRNN, IG, Budget, Known, Problem, Reconstruction, Refusal, reconstruct
from bract.attacks.adaptive.pruning import bound_dropped
from bract.attacks.adaptive.simulated_defense import Clip, DefendedClient, Prune
from bract.attacks.methods.baselines import prior_only
from bract.attacks.problem.case import open_case
from bract.attacks.problem.likelihoods import GaussianLikelihood, LaplaceLikelihood
from bract.attacks.problem.objectives import SquaredError
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext, build_defenses
from bract.defenses.pruning import Pruning
from bract.updates.update import flatten
from experiments.harness.bayes_reading import DETERMINISTIC, bayes_evidence, bayesian, before_bayes


def defended(clean: Any, *entries: dict[str, Any]) -> Any:
    chain = build_defenses(list(entries))
    update = chain.protect(clean.update, {}, ProtectContext(seed=0))
    return replace(
        clean, update=update, declaration=replace(clean.declaration, defenses=tuple(chain.public()))
    )


def problem_of(seen: Any, images: int = 1) -> Problem:
    case = open_case(seen, tier="adaptive", max_images=images, view=bayes_evidence)
    return Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)


def nats(problem: Problem, images: Any, labels: Any) -> float:
    rows = torch.nn.functional.one_hot(labels, 10)[None].double()
    simulated = problem.simulate(images[None].double(), rows, problem.unknowns())
    assert problem.likelihood is not None
    return float(problem.distance(problem.likelihood, simulated).detach())


def test_clipping_by_hand() -> None:
    sent = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[-4.0], [0.4]])}
    clipped = Clip(1.0)(sent)
    assert clipped["a"].tolist() == [pytest.approx([0.6, 0.0]), pytest.approx([0.3, 0.0])]
    assert clipped["b"].flatten().tolist() == pytest.approx([-0.8, 0.4])
    assert Clip(3.5, 1)(sent)["b"].flatten().tolist() == pytest.approx([-2.0, 0.4])


@pytest.mark.parametrize("scope", ["whole", "tensor"])
def test_simulated_pruning_is_the_defenses_own(scope: Any) -> None:
    update = {"a": torch.randn(7, 9), "b": torch.randn(11)}
    wanted = Pruning(ratio=0.63, scope=scope).protect(update, {}, ProtectContext(seed=0))
    found = Prune(0.63, scope)({name: value[None] for name, value in update.items()})
    for name, value in wanted.items():
        assert torch.equal(found[name][0], value)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("clip", [None, 0.3, 50.0])
def test_the_truth_has_the_expected_nats_and_others_have_more(
    observe: Any, digits: Any, kind: Any, clip: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    clean = observe(images, labels, init="uniform")
    seen = defended(clean, {"name": "noise", "kind": kind, "std": 1e-3, "clip": clip})
    problem = problem_of(seen)
    count = flatten(seen.update).numel()
    # The mean of |u - m|^2 / (2 sigma^2) is D / 2, that of |u - m|_1 / b is D.
    mean, deviation = (count / 2, (count / 2) ** 0.5) if kind == "gaussian" else (count, count**0.5)
    at_truth = nats(problem, images, labels)
    assert abs(at_truth - mean) < 5.0 * deviation
    assert nats(problem, digits[0][1:2], labels) > at_truth + 100


def test_the_scale_of_local_steps_reaches_deviation_and_bound(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1], steps=1, lr=0.1)
    seen = defended(clean, {"name": "noise", "std": 1e-3, "clip": 0.05})
    found = bayes_evidence(seen, Known())
    assert isinstance(found.likelihood, GaussianLikelihood)
    assert found.likelihood.deviation == pytest.approx(1e-2)
    forward = open_case(seen, tier="adaptive", max_images=1, view=bayes_evidence).forward
    assert isinstance(forward, DefendedClient)
    (part,) = forward.parts
    assert isinstance(part, Clip)
    assert part.bound == pytest.approx(0.5)
    assert part.order == 2


def test_laplace_noise_with_epsilon_clips_in_the_1_norm(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    entry = {"name": "noise", "kind": "laplace", "epsilon": 4.0, "clip": 2.0}
    seen = defended(clean, entry)
    found = bayes_evidence(seen, Known())
    assert isinstance(found.likelihood, LaplaceLikelihood)
    assert found.likelihood.deviation == pytest.approx(2.0**0.5)
    forward = open_case(seen, tier="adaptive", max_images=1, view=bayes_evidence).forward
    assert isinstance(forward, DefendedClient)
    assert forward.parts == (Clip(2.0, 1),)


@pytest.mark.parametrize("scope", ["whole", "tensor"])
def test_dropped_coordinates_are_bounded_by_the_smallest_survivor(
    observe: Any, digits: Any, scope: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen = defended(clean, {"name": "pruning", "ratio": 0.7, "scope": scope})
    found = bound_dropped(seen, Known())
    assert found.bounds is not None
    whole = flatten(seen.update).abs()
    for name, value in seen.update.items():
        of = value.abs().flatten() if scope == "tensor" else whole
        smallest = float(of[of > 0].min())
        assert found.bounds[name][value == 0].tolist() == pytest.approx(
            [smallest] * int((value == 0).sum())
        )
        assert torch.all(found.bounds[name][value != 0] == 0)
    problem = problem_of(seen)
    truth = {n: v[None].double() for n, v in clean.update.items()}
    assert float(problem.distance(SquaredError(), truth)) == 0.0
    name = max(seen.update, key=lambda n: int((seen.update[n] == 0).sum()))
    where = (seen.update[name] == 0).nonzero()[0]
    moved = truth[name].clone()
    limit = float(found.bounds[name][tuple(where)])
    moved[(0, *where)] = -3.0 * limit
    beyond = float(problem.distance(SquaredError(), truth | {name: moved}))
    assert beyond == pytest.approx((2.0 * limit) ** 2, rel=1e-5)


def test_pruning_and_noise_are_simulated_in_their_order(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    clean = observe(images, labels, init="uniform")
    seen = defended(
        clean, {"name": "pruning", "ratio": 0.8}, {"name": "noise", "std": 1e-3, "clip": 0.5}
    )
    problem = problem_of(seen)
    count = flatten(seen.update).numel()
    assert nats(problem, images, labels) == pytest.approx(count / 2, abs=5 * (count / 2) ** 0.5)
    assert isinstance(problem.forward, DefendedClient)
    assert problem.forward.parts == (Prune(0.8, "whole"), Clip(0.5))


def test_soteria_and_pruning_leave_zero_columns_out(observe: Any, digits: Any) -> None:
    model_of = capture(digits[0][:1], digits[1][:1], {"name": "soteria"}, model="lenet-strided")
    chain = build_defenses([{"name": "soteria"}, {"name": "pruning", "ratio": 0.6}])
    pruned = Pruning(ratio=0.6).protect(model_of.seen.update, {}, ProtectContext(seed=0))
    declaration = replace(model_of.seen.declaration, defenses=tuple(chain.public()))
    found = bayes_evidence(replace(model_of.seen, update=pruned, declaration=declaration), Known())
    assert found.bounds is not None
    assert found.weights is not None
    (name,) = found.weights
    zero = (pruned[name] == 0).all(dim=0)
    assert torch.equal(found.weights[name][0] == 0, zero)


def test_a_degenerate_likelihood_is_the_adaptive_attacker_and_says_why(digits: Any) -> None:
    seen = capture(digits[0][:1], digits[1][:1], {"name": "soteria"}, model="lenet-strided").seen
    found = bayes_evidence(seen, Known())
    assert found.likelihood is None
    assert found.notes["likelihood"] == DETERMINISTIC["soteria"]
    assert found.notes["pruned"] == evidence_for(seen, "adaptive").notes["pruned"]


def test_a_chain_without_a_likelihood_is_refused_by_name(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    entries = ({"name": "guardian"}, {"name": "pruning"}, {"name": "noise", "std": 1e-3})
    seen = defended(clean, *entries)
    (found,) = reconstruct(seen, bayesian(IG()), budget=Budget(iterations=1), device="cpu")
    assert isinstance(found, Refusal)
    assert "no adaptive attacker knows guardian then pruning then noise" in found.reason


@pytest.mark.slow
def test_the_bayes_attacker_beats_one_who_ignores_or_discounts_the_noise(
    observe: Any, digits: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    clean = observe(images, labels, init="uniform")
    seen = defended(clean, {"name": "noise", "std": 5e-3})
    wrong = {}
    for name, using in (
        ("ignoring", IG()),
        ("discounting", before_bayes(IG())),
        ("bayes", bayesian(IG())),
    ):
        (found,) = reconstruct(seen, using, budget=Budget(iterations=200), device="cpu")
        assert isinstance(found, Reconstruction)
        wrong[name] = float((found.images - images).square().mean())
    assert wrong["bayes"] < 0.7 * wrong["discounting"]
    assert wrong["bayes"] < 0.7 * wrong["ignoring"]


def test_the_loss_is_the_posterior_in_nats_and_components_say_so(observe: Any, tiny: Any) -> None:
    clean = observe(tiny[0][:1], tiny[1][:1], init="uniform")
    seen = defended(clean, {"name": "noise", "std": 1e-2})
    (found,) = reconstruct(seen, bayesian(GRNN()), budget=Budget(iterations=3), device="cpu")
    assert isinstance(found, Reconstruction)
    assert {"Gaussian likelihood", "total variation in nats"} <= set(found.pick.components)
    assert found.final_loss > flatten(seen.update).numel() / 4


def test_a_prior_alone_sees_no_likelihood(observe: Any, tiny: Any) -> None:
    clean = observe(tiny[0][:1], tiny[1][:1], init="uniform")
    made = []
    for std in (1e-3, 1e-2):
        seen = defended(clean, {"name": "noise", "std": std})
        (found,) = reconstruct(
            seen, bayesian(prior_only(IG())), budget=Budget(iterations=5), device="cpu"
        )
        assert isinstance(found, Reconstruction)
        made.append(found.images)
    assert torch.equal(*made)
