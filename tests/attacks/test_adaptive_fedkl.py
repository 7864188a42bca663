import json
from dataclasses import replace

import pytest
import torch
from defended_clients import capture, residual

from bract.attacks import IG, Budget, Engine, Refusal, attack, evidence_for, reconstruct
from bract.attacks.adaptive import key_known
from bract.attacks.adaptive.fedkl import FedKLHyper, LockedClient
from bract.attacks.adaptive.statistics import statistics_to_match
from bract.attacks.descent import Run
from bract.attacks.gauss_newton import solve_from
from bract.attacks.metrics import psnr
from bract.attacks.objectives import RelativeError
from bract.attacks.problem import Problem, open_case
from bract.client.defenses import FedKL
from bract.errors import BractError
from bract.models.keylock import Lock
from bract.observation import Observation, ObservationStore

ENTRY = {"name": "fedkl"}


def locked(digits, count=1, entry=ENTRY, model="lenet-strided-bn", **settings):
    return capture(digits[0][:count], digits[1][:count], entry, model=model, **settings)


def coefficients(captured, *, relu=True):
    own = {n.removeprefix("fedkl."): v for n, v in captured.state.items()}
    return Lock.load(own, relu=relu).coefficients()


def problem_of(seen: Observation, restarts=1):
    case = open_case(seen, tier="adaptive", max_images=8, unroll=16)
    lanes = [(case, r) for r in range(restarts)]
    return Problem.stack(lanes, seed=0, device=torch.device("cpu"))


def test_declared_defaults_are_those_of_the_defense():
    assert FedKLHyper().model_dump() == FedKL().model_dump()


@pytest.mark.parametrize(
    "entry",
    [ENTRY, {"name": "fedkl", "blocks": "every"}, {"name": "fedkl", "relu": False}],
    ids=["first", "every", "no-relu"],
)
@pytest.mark.parametrize("model", ["lenet-bn", "lenet-strided-bn"])
def test_at_the_clients_own_lock_the_simulation_is_its_update(digits, entry, model):
    captured = locked(digits, 2, entry, model)
    own = coefficients(captured, relu=entry.get("relu", True))
    assert residual(captured, own, lanes=2) < 1e-6
    wrong = {name: value + 0.1 for name, value in own.items()}
    assert residual(captured, wrong) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_lock_learns_along_where_local_steps_are_unrolled(digits, momentum):
    short = {"name": "fedkl", "key_length": 4}
    captured = locked(digits, 3, short, steps=3, batch_size=1, lr=0.02, momentum=momentum)
    own = coefficients(captured)
    case = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16)
    assert isinstance(case.forward, LockedClient)
    # A key of four numbers is seldom of average length: 1 + |key|^2 is put in its place.
    length = float(captured.state["fedkl.key"].square().sum())
    rate = (1.0 + length) / (1.0 + 4.0 / 3.0)
    assert residual(captured, own) > 1e-6
    declared = {**captured.seen.protocol.defenses[0], "rate": 0.5 * rate}
    exact = replace(
        captured,
        seen=replace(captured.seen, protocol=replace(captured.seen.protocol, defenses=(declared,))),
    )
    assert residual(exact, own) < 5e-6
    still = {**declared, "rate": 1e-9}
    constant = replace(
        captured,
        seen=replace(captured.seen, protocol=replace(captured.seen.protocol, defenses=(still,))),
    )
    assert residual(constant, own) > 10 * residual(exact, own)
    notes = evidence_for(captured.seen, "adaptive").notes
    assert "learn along" in notes["local_steps"]


def test_restarts_start_from_locks_as_clients_draw_them(digits):
    starts = problem_of(locked(digits).seen, restarts=40).unknowns()
    gamma, beta = (starts[f"features.1.{part}"].detach() for part in ("gamma", "beta"))
    assert gamma.shape == (40, 12)
    assert len({tuple(g.tolist()) for g in gamma}) == 40
    # |N(0, 1/3)| has mean 0.266; behind the ReLU half of beta is zero.
    assert float(gamma.min()) > 0
    assert float(gamma.mean()) == pytest.approx(0.266, abs=0.03)
    assert float((beta == 0).float().mean()) == pytest.approx(0.5, abs=0.08)


def test_gamma_and_beta_are_recovered_with_the_image(tiny):
    captured = capture(tiny[0][:1], tiny[1][:1], ENTRY, model="lenet-strided-bn", init="uniform")
    problem = problem_of(captured.seen)
    labels = torch.nn.functional.one_hot(captured.labels, 10)[None]
    own = coefficients(captured)
    near = (captured.images[None] + 0.1 * torch.randn(1, 1, 1, 8, 8)).clamp(0, 1)
    found = solve_from(
        problem, near, labels, Run(iterations=40), unknowns=problem.unknowns(), tolerance=1e-6
    )
    for name, value in own.items():
        assert torch.allclose(found.unknowns[name][0].float(), value, atol=0.02), name


def test_the_adaptive_attacker_comes_near_the_one_who_holds_the_key(tiny):
    captured = locked(tiny, buffers_return=True, init="uniform")
    locks = {captured.seen.key: coefficients(captured)}
    using, budget = attack("best"), Budget(iterations=200)
    oblivious, adaptive, known = (
        float(psnr(found.images, captured.images)[0])
        for found in (
            using(captured.seen, budget=budget),
            using(captured.seen, budget=budget, tier="adaptive"),
            key_known(using, locks)(captured.seen, budget=budget),
        )
    )
    assert adaptive > known - 3
    assert adaptive > oblivious + 20


def test_returned_statistics_tell_the_brightness_that_the_gradient_hides(digits):
    brighter = 0.2 + 0.5 * digits[0][:1]
    captured = capture(brighter, digits[1][:1], ENTRY, model="lenet-bn", buffers_return=True)
    with_statistics = problem_of(captured.seen)
    without = problem_of(replace(captured.seen, returned_buffers={}))
    rows = torch.nn.functional.one_hot(captured.labels, 10)[None].float()
    own = {name: value[None] for name, value in coefficients(captured).items()}
    for problem, hidden in ((without, True), (with_statistics, False)):
        losses = [
            float(problem.distance(RelativeError(), problem.simulate(x[None], rows, own)))
            for x in (brighter, brighter + 0.1)
        ]
        assert losses[0] < 1e-6
        assert (losses[1] < 1e-6) is hidden
    notes = [p.cases[0].evidence.notes["batch_statistics"] for p in (with_statistics, without)]
    assert notes == ["matched", "not known from this capture"]


@pytest.mark.parametrize("model", ["lenet-bn", "lenet-strided-bn"])
def test_the_fast_path_of_a_locked_model_agrees_with_vmap(digits, model):
    captured = locked(digits, 2, {"name": "fedkl", "blocks": "every"}, model, buffers_return=True)
    problem = problem_of(captured.seen, restarts=2).to(torch.float64)
    images = torch.rand(2, 2, 1, 16, 16, dtype=torch.float64)
    labels = torch.full((2, 2, 10), 0.1, dtype=torch.float64)
    unknowns = {n: v.detach().to(torch.float64) for n, v in problem.unknowns().items()}
    assert problem.victim.network is not None
    fast = problem.simulate(images, labels, unknowns)
    problem.victim.network = None
    slow = problem.simulate(images, labels, unknowns)
    assert set(fast) == set(slow) > set(captured.seen.parameters)
    for name, value in slow.items():
        assert torch.allclose(fast[name], value, atol=1e-10), name


def test_two_observations_and_their_restarts_run_as_one_batch(digits):
    seen = [locked(digits, seed=i, client=f"client-{i}").seen for i in (0, 1)]
    together = reconstruct(
        seen, IG(), budget=Budget(iterations=3, restarts=2), tier="adaptive", device="cpu"
    )
    alone = reconstruct(
        seen[1], IG(), budget=Budget(iterations=3, restarts=2), tier="adaptive", device="cpu"
    )
    assert torch.allclose(together[1].images, alone[0].images, atol=1e-3)


def test_the_known_lock_is_in_nothing_that_is_handed_back(digits):
    captured = locked(digits)
    own = coefficients(captured)
    found = key_known(IG(), {captured.seen.key: own})(captured.seen, budget=Budget(iterations=2))
    text = json.dumps(found.summary())
    for value in own.values():
        for number in value[value != 0].tolist():
            assert f"{number:.4f}" not in text
    assert found.attack == "key-known"
    assert found.settings["forward"]["known"] is True


def test_the_key_known_attacker_takes_the_iterations_of_the_attack_it_runs(digits):
    captured = locked(digits)
    quick = key_known(IG(), {captured.seen.key: coefficients(captured)})
    (found,) = quick.run(
        [captured.seen],
        budget=Budget(seconds=0.3),
        seed=0,
        tier="oblivious",
        engine=Engine(),
    )
    assert not isinstance(found, Refusal)
    assert found.iterations > 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rate": 2.0}, "rate"),
        ({"key_length": 0}, "key_length"),
        ({"blocks": "last"}, "blocks"),
        ({"secret": 1}, "secret"),
        ({"blocks": "every"}, "no features.4.bias"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(digits, changed, reason):
    seen = locked(digits).seen
    entry = {**seen.protocol.defenses[0], **changed}
    wrong = replace(seen, protocol=replace(seen.protocol, defenses=(entry,)))
    with pytest.raises(BractError, match=reason):
        evidence_for(wrong, "adaptive")


def test_an_update_that_holds_the_lock_is_flagged(digits):
    seen = locked(digits).seen
    leaked = replace(seen, update=seen.update | {"features.1.scale_fc.weight": torch.zeros(12)})
    with pytest.raises(BractError, match=r"features\.1\.scale_fc\.weight.*nothing of the lock"):
        evidence_for(leaked, "adaptive")


def test_a_capture_of_the_plain_model_is_flagged(observe, digits):
    plain = observe(digits[0][:1], digits[1][:1], model="lenet-strided-bn", defenses=(ENTRY,))
    with pytest.raises(BractError, match=r"has no features\.1\.bias, features\.1\.weight"):
        evidence_for(plain, "adaptive")


def test_a_capture_from_disk_gives_the_same_evidence(digits, tmp_path):
    seen = locked(digits, buffers_return=True).seen
    store = ObservationStore(tmp_path)
    loaded = store.load(store.save(seen))
    first, second = (evidence_for(o, "adaptive") for o in (seen, loaded))
    assert first.notes == second.notes
    assert all(torch.equal(v, second.target[n]) for n, v in first.target.items())


def test_the_weight_of_batch_statistics_is_no_trust_in_the_gradient(digits):
    captured = locked(digits, buffers_return=True)
    case = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16)
    _, weights = statistics_to_match(captured.seen, case.victim)
    assert case.evidence.weights is not None and weights
    assert set(case.evidence.weights) == set(weights)
    for name, value in weights.items():
        assert torch.equal(case.evidence.weights[name], value)
