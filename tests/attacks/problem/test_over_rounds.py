"""Several rounds of one client, attacked together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from observing import scores
from refusals import refused

from bract import Observation
from bract.attacks import (
    IG,
    Budget,
    Case,
    Cosine,
    Evidence,
    Known,
    Problem,
    Reconstruction,
    reconstruct,
    reconstruct_over_rounds,
)
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.attacks.problem.case import open_case
from bract.attacks.problem.dropout import MASK
from bract.attacks.problem.identifiability import identifiability
from bract.attacks.problem.joint_case import JointCase, join_rounds
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.over_rounds import OverRounds, name_in
from bract.attacks.result import SeedBudget
from bract.attacks.solve.labels import infer_labels
from bract.errors import BractError
from bract.models import create_model
from bract.models.initialise import initialise

CPU = torch.device("cpu")


FEW = SeedBudget(candidates=1)


def rounds_of(observe: Any, images: Any, labels: Any, count: int, **how: Any) -> list[Observation]:
    """Uploads of the same images in several rounds; the server steps by each."""
    network = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    network = initialise(network, "default", 0)
    found = []
    for number in range(1, count + 1):
        seen = observe(images, labels, model=network, **how)
        declaration = replace(seen.declaration, model="lenet-strided")
        # Steps of a client move the network too; the server sets it.
        found.append(replace(seen, round=number, declaration=declaration))
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(seen.parameters[name])
                parameter.sub_(seen.update[name], alpha=0.5 if not how else 1.0)
    return found


def noisy(rounds: list[Observation], deviation: float) -> list[Observation]:
    # Not from a generator whose seeds the attacker tries.
    generator = np.random.default_rng(7)
    entry = {"name": "noise", "kind": "gaussian", "clip": None, "std": deviation}
    return [
        replace(
            seen,
            update={
                name: value
                + deviation * torch.from_numpy(generator.standard_normal(value.shape)).float()
                for name, value in seen.update.items()
            },
            declaration=replace(seen.declaration, defenses=(entry,)),
        )
        for seen in rounds
    ]


def opened(rounds: list[Observation], **how: Any) -> list[Case]:
    return [open_case(seen, tier="oblivious", max_images=8, **how) for seen in rounds]


def test_one_round_is_attacked_as_it_is(observe: Any, tiny: Any) -> None:
    seen = rounds_of(observe, tiny[0][:1], tiny[1][:1], 1)
    joint = reconstruct_over_rounds(seen, IG(), budget=Budget(iterations=5), device="cpu")
    (single,) = reconstruct(seen, IG(), budget=Budget(iterations=5), device="cpu")
    assert isinstance(single, Reconstruction)
    assert torch.equal(joint.images, single.images)
    assert joint.final_loss == single.final_loss


def test_the_true_images_explain_every_round(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    joint = join_rounds(opened(rounds_of(observe, images, labels, 3)))
    assert isinstance(joint, JointCase)
    problem = Problem.stack([(joint, 0)], seed=0, device=CPU, dtype=torch.float64)
    rows = torch.nn.functional.one_hot(labels, 10)[None].double()
    simulated = problem.simulate(images[None].double(), rows, {})
    assert problem.distance(RelativeError(), simulated) < 1e-10
    assert len(simulated) == 3 * len(joint.target_model.parameter_names)


def test_a_relative_error_is_the_mean_of_the_rounds(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    cases = opened(rounds_of(observe, images, labels, 3))
    other = tiny[0][5:6][None].double()
    rows = torch.nn.functional.one_hot(labels, 10)[None].double()

    def error(case: Case) -> float:
        problem = Problem.stack([(case, 0)], seed=0, device=CPU, dtype=torch.float64)
        simulated = problem.simulate(other, rows, {})
        return float(problem.distance(RelativeError(), simulated))

    own = [error(case) for case in cases]
    assert max(own) / min(own) > 1.01
    assert error(join_rounds(cases)) == pytest.approx(sum(own) / 3, rel=1e-4)


def test_a_round_weighs_by_how_much_of_it_is_trusted(observe: Any, tiny: Any) -> None:
    rounds = rounds_of(observe, tiny[0][:1], tiny[1][:1], 2)

    def trusted(seen: Observation, share: float) -> Case:
        target = seen.gradient()
        weights = {n: torch.full_like(v, share) for n, v in target.items()}
        read = Evidence(target=target, weights=weights)
        return open_case(seen, tier="adaptive", max_images=8, view=lambda *_: read)

    joint = join_rounds([trusted(rounds[0], 1.0), trusted(rounds[1], 0.1)])
    weights, target = joint.evidence.weights or {}, joint.evidence.target
    parts = [
        sum(float((weights[n] * v.square()).sum()) for n, v in target.items() if n[0] == number)
        for number in "01"
    ]
    assert parts[0] / parts[1] == pytest.approx(10.0, rel=1e-4)


def test_rounds_keep_what_their_evidence_leaves_open(observe: Any, tiny: Any) -> None:
    """Unknown factors are each round's own, and so are directions, bounds and alternatives."""
    images, labels = tiny[0][:1], tiny[1][:1]
    factors = (2.0, 5.0)

    def shrunk(seen: Observation, factor: float) -> Case:
        target = {n: v / factor for n, v in seen.gradient().items()}
        name = next(iter(target))
        along = torch.zeros(1, *target[name].shape)
        along.view(-1)[0] = 1.0
        target[name] = target[name] + 0.1 * factor * along[0]
        read = Evidence(target=target, unknown_factor=True, nuisance={name: along})
        return open_case(seen, tier="adaptive", max_images=8, view=lambda *_: read)

    rounds = rounds_of(observe, images, labels, 2)
    cases = [shrunk(seen, factor) for seen, factor in zip(rounds, factors, strict=True)]
    problem = Problem.stack([(join_rounds(cases), 0)], seed=0, device=CPU, dtype=torch.float64)
    rows = torch.nn.functional.one_hot(labels, 10)[None].double()
    simulated = problem.simulate(images[None].double(), rows, {})
    single = [Problem.stack([(case, 0)], seed=0, device=CPU, dtype=torch.float64) for case in cases]
    for number, alone in enumerate(single):
        at = {n.rpartition(":")[2]: v for n, v in simulated.items() if n.startswith(f"{number}:")}
        expected, found = alone.reading(at), problem.reading(simulated)
        for name, value in expected.items():
            assert torch.allclose(found[f"{number}::{name}"], value, rtol=1e-6, atol=1e-12)


def test_two_noisy_rounds_beat_one(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    rounds = noisy(rounds_of(observe, images, labels, 2), 2e-5)
    budget = Budget(iterations=150, weak_seeds=FEW)

    def psnr(taken: list[Observation]) -> float:
        found = reconstruct_over_rounds(taken, IG(), budget=budget, tier="adaptive", device="cpu")
        return float(scores(found.images, images)[0].psnr)

    assert psnr(rounds) > psnr(rounds[-1:]) + 1.0


def test_likelihoods_of_rounds_add_up(observe: Any, tiny: Any) -> None:
    """By hand: the squared distance over twice the variance, summed over rounds."""
    images, labels = tiny[0][:1], tiny[1][:1]
    rounds = noisy(rounds_of(observe, images, labels, 2), 0.1)
    cases = [
        open_case(seen, tier="adaptive", known=Known(weak_seeds=FEW), max_images=8)
        for seen in rounds
    ]
    problem = Problem.stack([(join_rounds(cases), 0)], seed=0, device=CPU, dtype=torch.float64)
    assert problem.likelihood is not None
    rows = torch.nn.functional.one_hot(labels, 10)[None].double()
    clean = rounds_of(observe, images, labels, 2)
    expected = sum(
        float((seen.update[n].double() - at.update[n].double()).square().sum()) / (2 * 0.1**2)
        for seen, at in zip(rounds, clean, strict=True)
        for n in seen.update
    )
    found = problem.distance(problem.likelihood, problem.simulate(images[None].double(), rows, {}))
    assert float(found) == pytest.approx(expected, rel=1e-4)
    assert identifiability(join_rounds(cases)).psnr > identifiability(cases[-1]).psnr


def test_gauss_newton_solves_rounds_together(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    rounds = rounds_of(observe, images, labels, 2)
    found = reconstruct_over_rounds(
        rounds, GaussNewton(), budget=Budget(iterations=15), device="cpu"
    )
    assert found.observation == "round-0002/client-0"
    assert found.settings["evidence"]["rounds"] == [1, 2]
    assert "2 rounds" in found.components
    assert min(float(row.psnr) for row in scores(found.images, images)) > 30.0


@pytest.mark.parametrize("assigned", [None, ((0, 1), (1, 2), (2, 0))])
def test_rounds_side_by_side_are_rounds_one_by_one(
    observe: Any, tiny: Any, assigned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3 if assigned is None else 2
    cases = opened(rounds_of(observe, tiny[0][:count], tiny[1][:count], 3))
    joint = join_rounds(cases, assigned=assigned)
    assert isinstance(joint.forward, OverRounds) and joint.forward.side_by_side
    problem = Problem.stack([(joint, 0), (joint, 1)], seed=0, device=CPU, dtype=torch.float64)
    images = tiny[0][10:16].view(2, 3, 1, 8, 8).double()
    rows = torch.nn.functional.one_hot(tiny[1][10:16], 10).view(2, 3, 10).double()
    fast = problem.simulate(images, rows, {})
    monkeypatch.setattr(OverRounds, "side_by_side", False)
    slow = problem.simulate(images, rows, {})
    assert fast.keys() == slow.keys()
    for name, value in slow.items():
        assert torch.allclose(fast[name], value, rtol=1e-10, atol=1e-12)


def test_labels_are_the_mean_of_the_rounds(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:4], tiny[1][:4]
    joint = join_rounds(opened(rounds_of(observe, images, labels, 3)))
    assert infer_labels(joint).labels.tolist() == sorted(labels.tolist())


def test_steps_in_an_open_order_are_matched_by_their_mean(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:4], tiny[1][:4]
    rounds = rounds_of(observe, images, labels, 2, steps=4, batch_size=2, lr=0.05)
    joint = join_rounds(opened(rounds)).simulating(unroll=16)
    problem = Problem.stack([(joint, 0)], seed=0, device=CPU, dtype=torch.float64)
    rows = torch.nn.functional.one_hot(labels, 10).double()
    orders = [[0, 1, 2, 3], [3, 1, 0, 2]]
    found = [
        problem.distance(Cosine(), problem.simulate(images[o][None].double(), rows[o][None], {}))
        for o in orders
    ]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-9)
    assert float(found[0]) < 0.01


def test_other_clients_models_and_orders_are_refused(observe: Any, tiny: Any) -> None:
    first, second = rounds_of(observe, tiny[0][:1], tiny[1][:1], 2)
    wrong = {
        "its client is 'client-1', that of round-0001/client-0 is 'client-0'": replace(
            second, client="client-1"
        ),
        "its model is 'lenet', that of round-0001/client-0 is 'lenet-strided'": replace(
            second, declaration=replace(second.declaration, model="lenet")
        ),
        "follows round 1": replace(second, round=1),
    }
    cases = opened([first, second])
    for text, other in wrong.items():
        with pytest.raises(BractError, match=text):
            join_rounds([cases[0], replace(cases[1], observation=other)])
    drawn = []
    for seen in (first, second):
        declaration = replace(seen.declaration, augmentation=("random-crop",))
        drawn.append(replace(seen, declaration=declaration))
    with refused("attack-unsuited", "random-crop"):
        join_rounds(opened(drawn))
    with refused("attack-unsuited", "client-1"):
        reconstruct_over_rounds([first, replace(second, client="client-1")], IG(), device="cpu")
    two = opened([replace(rounds_of(observe, tiny[0][:2], tiny[1][:2], 1)[0], round=2)])
    with refused("attack-unsuited", 2):
        join_rounds([cases[0], *two])
    with refused("attack-unsuited", "uploads"):
        join_rounds([])


@pytest.mark.parametrize("masked", [0, 1])
def test_a_mask_that_one_round_alone_tells_is_simulated(
    observe: Any, tiny: Any, masked: int
) -> None:
    cases = opened(rounds_of(observe, tiny[0][:1], tiny[1][:1], 2))
    name = "classifier.1.weight"
    mask = torch.zeros(cases[masked].observation.parameters[name].shape[1])
    evidence = cases[masked].evidence
    evidence = replace(evidence, buffers=evidence.buffers | {MASK + name: mask})
    cases[masked] = replace(cases[masked], evidence=evidence)
    problem = Problem.stack([(join_rounds(cases), 0)], seed=0, device=CPU, dtype=torch.float64)
    rows = torch.nn.functional.one_hot(tiny[1][:1], 10)[None].double()
    found = problem.simulate(tiny[0][:1][None].double(), rows, {})
    assert not found[name_in(masked, name)].any()
    assert found[name_in(1 - masked, name)].any()
