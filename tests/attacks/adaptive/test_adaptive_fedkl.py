import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pack
import pytest
import torch
from defended_clients import capture, residual
from refusals import refused

from bract import Observation, ObservationStore
from bract.attacks import (
    IG,
    Attack,
    Budget,
    Outcome,
    Problem,
    Reconstruction,
    Refusal,
    Run,
    attack,
    base,
    reconstruct,
)
from bract.attacks.adaptive.batch_statistics import statistics_to_match
from bract.attacks.adaptive.fedkl import fedkl
from bract.attacks.adaptive.fedkl.fedkl import CENTRE, HIDDEN, REACH, LockedClient
from bract.attacks.methods.gauss_newton import solve_from
from bract.attacks.problem.case import open_case
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.solve.start_search import from_best_start
from bract.attacks.task import AttackTask, evidence_for
from bract.audit.questions.reconstruction.scores.image import psnr
from bract.models import create_model
from bract.models.keylock import Lock, insert_key_locks
from experiments.harness.known_secrets import What, key_of, known, lock_gradient, reachable

ENTRY = {"name": "fedkl"}
RELU = {"name": "fedkl", "relu": True}
SECRETS: tuple[What, ...] = ("key", "lock", "both")


def locked(
    digits: Any,
    count: Any = 1,
    entry: Any = ENTRY,
    model: Any = "lenet-strided-bn",
    **settings: Any,
) -> Any:
    return capture(digits[0][:count], digits[1][:count], entry, model=model, **settings)


def lock_of(captured: Any, *, relu: Any = False) -> Any:
    own = {n.removeprefix("fedkl."): v for n, v in captured.state.items()}
    return Lock.load(own, relu=relu)


def coefficients(captured: Any, *, relu: Any = False) -> Any:
    return lock_of(captured, relu=relu).coefficients()


def problem_of(seen: Observation, restarts: Any = 1) -> Any:
    case = open_case(seen, tier="adaptive", max_images=8, unroll=16)
    trials = [(case, r) for r in range(restarts)]
    return Problem.stack(trials, seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "entry",
    [ENTRY, {"name": "fedkl", "blocks": "every"}, {"name": "fedkl", "relu": True}],
    ids=["first", "every", "relu"],
)
@pytest.mark.parametrize("model", ["lenet-bn", "lenet-strided-bn"])
def test_at_the_clients_own_lock_the_simulation_is_its_update(
    digits: Any, entry: Any, model: Any
) -> None:
    captured = locked(digits, 2, entry, model)
    own = coefficients(captured, relu=entry.get("relu", False))
    assert residual(captured, own, trials=2) < 1e-6
    wrong = {name: value + 0.1 for name, value in own.items()}
    assert residual(captured, wrong) > 1e-3


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.5, 0.0), (0.5, 2.0)])
def test_the_lock_learns_along_where_local_steps_are_unrolled(
    digits: Any, momentum: Any, mu: Any
) -> None:
    short = {"name": "fedkl", "key_length": 4, "rate": 0.5}
    captured = locked(
        digits, 3, short, steps=3, batch_size=1, lr=0.02, momentum=momentum, proximal_mu=mu
    )
    own = coefficients(captured)
    case = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16)
    assert isinstance(case.forward, LockedClient)
    # A key of four numbers is seldom of average length: 1 + |key|^2 is put in its place.
    length = float(captured.state["fedkl.key"].square().sum())
    rate = (1.0 + length) / (1.0 + 4.0 / 3.0)
    assert residual(captured, own) > 1e-6
    declared = {**captured.seen.declaration.defenses[0], "rate": 0.5 * rate}
    exact = replace(
        captured,
        seen=replace(
            captured.seen, declaration=replace(captured.seen.declaration, defenses=(declared,))
        ),
    )
    assert residual(exact, own) < 5e-6
    still = {**declared, "rate": 1e-9}
    constant = replace(
        captured,
        seen=replace(
            captured.seen, declaration=replace(captured.seen.declaration, defenses=(still,))
        ),
    )
    assert residual(constant, own) > 10 * residual(exact, own)
    notes = evidence_for(captured.seen, "adaptive").notes
    assert "learn along" in notes["local_steps"]


def known_problem(captured: Any, what: What, *, relu: Any = False, restarts: Any = 1) -> Any:
    secrets = {captured.seen.key: lock_of(captured, relu=relu)}
    case = open_case(captured.seen, tier="adaptive", max_images=8)
    case = known(IG(), secrets, what).prepare(case)
    trials = [(case, r) for r in range(restarts)]
    return Problem.stack(trials, seed=0, device=torch.device("cpu")).to(torch.float64)


def mismatch(problem: Any, captured: Any, unknowns: Any) -> float:
    rows = torch.nn.functional.one_hot(captured.labels, 10)[None].double()
    at = {name: value[None].double() for name, value in unknowns.items()}
    simulated = problem.simulate(captured.images[None].double(), rows, at)
    return math.sqrt(float(problem.distance(RelativeError(), simulated)))


def shared_gradient(captured: Any) -> Any:
    return lock_gradient(captured.seen, lock_of(captured), captured.images, captured.labels)


def test_the_lock_layers_gradient_is_that_of_autograd_and_gives_the_key_away(digits: Any) -> None:
    captured = locked(digits, 2)
    lock = lock_of(captured)
    own = {**captured.seen.parameters, **captured.seen.buffers}
    model = create_model(
        "lenet-strided-bn", classes=10, channels=1, image_size=16, activation="sigmoid"
    )
    lock.attach(insert_key_locks(model)).load_state_dict(own)
    spec = captured.seen.declaration
    inputs = (captured.images - spec.mean[0]) / spec.std[0]
    torch.nn.functional.cross_entropy(model.train()(inputs), captured.labels).backward()
    shared = shared_gradient(captured)
    for name, pair in lock.layers.items():
        for part, layer in zip(("gamma", "beta"), pair, strict=True):
            torch.testing.assert_close(shared[f"{name}.{part}/weight"], layer.weight.grad)
            torch.testing.assert_close(shared[f"{name}.{part}/bias"], layer.bias.grad)
    torch.testing.assert_close(key_of(shared), lock.key)


@pytest.mark.parametrize("what", ["gradient", "all"])
def test_the_lock_layers_gradient_is_matched(digits: Any, what: Any) -> None:
    captured = locked(digits, 2, {"name": "fedkl", "key_length": 80})
    secrets = {captured.seen.key: lock_of(captured)}
    shared = {captured.seen.key: shared_gradient(captured)}
    case = open_case(captured.seen, tier="adaptive", max_images=8)
    case = known(IG(), secrets, what, shared=shared).prepare(case)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu")).to(torch.float64)
    own = {HIDDEN: reaching(captured)} if what == "gradient" else {}
    assert mismatch(problem, captured, own) < 1e-5
    names = set(coefficients(captured))
    assert names <= set(problem.target) and names <= set(
        problem.simulate(
            captured.images[None].double(),
            torch.nn.functional.one_hot(captured.labels, 10)[None].double(),
            {name: value[None].double() for name, value in own.items()},
        )
    )


def reaching(captured: Any, *, relu: Any = False) -> Any:
    """The least numbers that make the client's key of its lock layers."""
    lock = lock_of(captured, relu=relu)
    centre, reach = reachable(lock)
    own = torch.cat([part(lock.key) for pair in lock.layers.values() for part in pair]).detach()
    return torch.linalg.lstsq(reach, (own - centre)[:, None]).solution[:, 0]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("blocks", ["first", "every"])
def test_every_part_of_the_secrets_explains_the_update_at_the_truth(
    digits: Any, relu: Any, steps: Any, blocks: Any
) -> None:
    entry = {"name": "fedkl", "relu": relu, "blocks": blocks, "key_length": 80}
    captured = locked(digits, 3, entry, steps=steps, batch_size=1 if steps else 3, lr=0.02)
    own = coefficients(captured, relu=relu)
    at: dict[What, Any] = {"both": {}, "key": own}
    if steps is None:
        # Unrolled, who lacks the key lacks the pace.
        at["lock"] = {HIDDEN: reaching(captured, relu=relu)}
    for what, unknowns in at.items():
        problem = known_problem(captured, what, relu=relu)
        assert set(problem.unknowns()) == set(unknowns)
        assert mismatch(problem, captured, unknowns) < 5e-6, what
        wrong = {name: value + 0.3 for name, value in unknowns.items()}
        assert not wrong or mismatch(problem, captured, wrong) > 1e-3, what


@pytest.mark.parametrize("what", ["key", "both"])
def test_whoever_holds_the_key_unrolls_the_lock_at_its_exact_pace(digits: Any, what: What) -> None:
    short = {"name": "fedkl", "key_length": 4}
    settings: dict[str, Any] = {"steps": 3, "batch_size": 1, "lr": 0.02, "momentum": 0.5}
    captured = locked(digits, 3, short, **settings)
    own = coefficients(captured) if what == "key" else {}
    assert mismatch(known_problem(captured, what), captured, own) < 5e-6
    assert residual(captured, coefficients(captured)) > 1e-5


def test_lock_layers_leave_as_many_numbers_as_they_have_rows_about_a_known_centre() -> None:
    source = torch.Generator().manual_seed(2)
    lock = Lock.draw({"a": 3, "b": 2}, 256, source=source)
    centre, reach = reachable(lock)
    assert centre.shape == (10,) and reach.shape == (10, 10)
    drawn = []
    for _ in range(2000):
        lock.key = torch.rand(256, generator=source)
        drawn.append(torch.cat(list(lock.coefficients().values())))
    values = torch.stack(drawn)
    torch.testing.assert_close(values.mean(dim=0), centre, atol=0.02, rtol=0)
    torch.testing.assert_close(torch.cov(values.T), reach @ reach.T, atol=0.005, rtol=0)
    # A deviation of 1/6 about the centre, where one who has no layers draws with 1/3 about zero.
    assert float(values.std(dim=0).mean()) == pytest.approx(1 / 6, abs=0.01)
    deep = Lock.draw({"a": 30}, 16, source=source)
    assert reachable(deep)[1].shape == (60, 16)


def test_who_holds_the_lock_layers_starts_from_keys_as_clients_draw_them(digits: Any) -> None:
    captured = locked(digits, 2)
    problem = known_problem(captured, "lock", restarts=50)
    start = problem.unknowns()[HIDDEN]
    assert start.shape == (50, 24)
    made = problem.forward.coefficients(problem.buffers, {HIDDEN: start})
    centre, reach = problem.buffers[CENTRE][0], problem.buffers[REACH][0]
    wanted = (centre + start @ reach.T).split(12, dim=1)
    for value, own in zip(made.values(), wanted, strict=True):
        torch.testing.assert_close(value, own)
    at_zero = known_problem(locked(digits, 2, RELU), "lock", relu=True, restarts=50)
    start = at_zero.unknowns()[HIDDEN].detach().requires_grad_()
    clipped = at_zero.forward.coefficients(at_zero.buffers, {HIDDEN: start})["features.1.gamma"]
    assert float(clipped.detach().min()) == 0.0
    clipped.sum().backward()
    assert start.grad is not None and bool((start.grad.abs().sum(dim=1) > 0).all())


def test_restarts_start_from_locks_as_clients_draw_them(digits: Any) -> None:
    starts = problem_of(locked(digits, 2).seen, restarts=40).unknowns()
    gamma, beta = (starts[f"features.1.{part}"].detach() for part in ("gamma", "beta"))
    assert gamma.shape == (40, 12)
    assert len({tuple(g.tolist()) for g in gamma}) == 40
    # |N(0, 1/9)| has mean 0.266.
    for value in (gamma, beta):
        assert float(value.abs().mean()) == pytest.approx(0.266, abs=0.03)
        assert float((value < 0).float().mean()) == pytest.approx(0.5, abs=0.08)
    behind = problem_of(locked(digits, 2, RELU).seen, restarts=40).unknowns()
    for value in behind.values():
        assert float(value.detach().min()) == 0.0
        assert float((value == 0).float().mean()) == pytest.approx(0.5, abs=0.08)


def test_gamma_and_beta_are_recovered_with_the_image(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fedkl, "read_lock", lambda *_, **__: None)
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


def found_with(captured: Any, trials: Any, restarts: Any = 1) -> Any:
    """An attack that finds the images, and no better lock than it was given; and its calls."""
    calls = []

    def solve(problem: Any, run: Any) -> Outcome:
        calls.append((problem.trials, run.iterations))
        given = {n: v.detach() for n, v in problem.unknowns().items()}
        rows = torch.nn.functional.one_hot(captured.labels, 10)
        return Outcome(
            captured.images.expand(problem.trials, *captured.images.shape),
            rows.expand(problem.trials, *rows.shape),
            torch.zeros(problem.trials),
            given,
            [[(0, 0.0)] for _ in range(problem.trials)],
            1,
        )

    problem = problem_of(captured.seen, restarts)
    return from_best_start(solve, problem, Run(iterations=trials)), calls


@pytest.mark.slow
@pytest.mark.parametrize("entry", [ENTRY, RELU], ids=["paper", "relu"])
def test_a_search_halves_its_starts_and_refines_their_locks_at_the_images_found(
    tiny: Any, entry: Any
) -> None:
    captured = locked(tiny, 2, entry, init="uniform")
    found, calls = found_with(captured, 160)
    assert calls == [(8, 10), (4, 20), (2, 40), (1, 160)]
    live = coefficients(captured, relu="relu" in entry)
    for name, value in live.items():
        # Where the ReLU holds gamma at zero, nothing is known of either number but that.
        known = live[name.replace("beta", "gamma")] > 0 if "relu" in entry else value == value
        off = (found.unknowns[name][0] - value)[known]
        assert float(off.abs().max()) < 0.02, name


def test_a_search_leaves_attacks_alone_that_cannot_judge_a_start(digits: Any, tiny: Any) -> None:
    assert found_with(locked(digits, 2, model="lenet-bn"), 160)[1] == [(1, 160)]  # max pooling
    assert found_with(locked(tiny, 1), 160)[1] == [(1, 160)]  # read: nothing is unknown
    prior = IG().prior()
    assert isinstance(prior, Attack) and not prior.matches and IG().matches


@pytest.mark.thorough
def test_the_result_says_by_its_residual_whether_a_searched_lock_was_found(
    tiny: Any, digits: Any
) -> None:
    for captured, telling in (
        (locked(tiny, 2), True),
        (locked(digits, 2, model="lenet-bn"), False),
    ):
        evidence = evidence_for(captured.seen, "adaptive")
        assert evidence.explain is not None
        for left, found in ((0.04, False), (5e-3, None), (3e-4, True)):
            notes = evidence.explain(coefficients(captured), left)
            assert notes["lock_residual"] == left
            assert notes.get("lock_found") == (found if telling else None)
    read = evidence_for(locked(tiny, 1).seen, "adaptive")
    assert read.explain is not None and read.explain(read.buffers, 0.04).get("lock_found") is None


@pytest.mark.slow
@pytest.mark.parametrize("entry", [ENTRY, RELU], ids=["paper", "relu"])
@pytest.mark.parametrize("seed", [1, 2])
def test_one_image_gives_the_lock_away_where_a_start_of_a_search_does_not_find_it(
    tiny: Any, entry: Any, seed: Any, monkeypatch: Any
) -> None:
    relu = entry.get("relu", False)
    captured = locked(tiny, 1, entry, buffers_return=True, init="uniform", seed=seed)
    using, budget = attack("best"), Budget(iterations=100)
    assert isinstance(using, Attack)

    def score(found: Reconstruction) -> float:
        return float(psnr(found.images, captured.images)[0])

    bound = known(using, {captured.seen.key: lock_of(captured, relu=relu)})
    adaptive = using(captured.seen, budget=budget, tier="adaptive")
    assert score(adaptive) > min(score(bound(captured.seen, budget=budget)) - 3, 50)
    assert adaptive.settings["evidence"]["unknowns"] == 0
    # The same attack that searches gamma and beta from one start fails, and says so; one that
    # halves its starts finds them; under a ReLU it found one of two.
    monkeypatch.setattr(fedkl, "read_lock", lambda *_, **__: None)
    halved = using(captured.seen, budget=budget, tier="adaptive")
    monkeypatch.setattr(base, "from_best_start", lambda solve, problem, run: solve(problem, run))
    searched = using(captured.seen, budget=budget, tier="adaptive")
    assert score(searched) < 15 and searched.final_loss > 1e3 * adaptive.final_loss
    assert searched.settings["evidence"]["lock_found"] is not True
    if not relu:
        assert score(halved) > 50 and halved.settings["evidence"]["lock_found"]


def test_an_attack_on_one_image_searches_no_lock_and_one_on_two_does(tiny: Any) -> None:
    for seen, searched in ((pack.upload("defended-fedkl-b1"), 0), (locked(tiny, 2).seen, 24)):
        problem = problem_of(seen)
        assert sum(value.numel() for value in problem.unknowns().values()) == searched
        assert (problem.cases[0].evidence.notes["unknowns"] == 0) is (searched == 0)


@pytest.mark.parametrize("init", ["default", "uniform"])
@pytest.mark.parametrize("entry", [ENTRY, RELU], ids=["paper", "relu"])
def test_gamma_and_beta_are_read_in_closed_form(digits: Any, entry: Any, init: Any) -> None:
    captured = locked(digits, 1, entry, init=init, seed=4)
    found = evidence_for(captured.seen, "adaptive")
    for name, value in coefficients(captured, relu=entry.get("relu", False)).items():
        torch.testing.assert_close(found.buffers[name], value, atol=2e-3, rtol=0)
    assert found.notes["lock_residual"] < 1e-3
    if "relu" in entry:
        dead = coefficients(captured, relu=True)["features.1.gamma"] == 0
        assert 0 < int(dead.sum()) < 12


def test_a_lock_is_read_where_black_is_the_number_zero(digits: Any) -> None:
    captured = locked(digits, 1, ENTRY, seed=4, mean=0.0, std=1.0)
    assert float(captured.images.min()) == 0.0
    found = evidence_for(captured.seen, "adaptive")
    for name, value in coefficients(captured).items():
        torch.testing.assert_close(found.buffers[name], value, atol=2e-3, rtol=0)


def test_an_image_darker_than_zero_is_told_from_its_negative_by_returned_statistics_alone(
    digits: Any,
) -> None:
    for returned, sign, taken in ((True, 1, "batch statistics"), (False, -1, "contrast")):
        captured = capture(
            0.2 * digits[0][:1],
            digits[1][:1],
            ENTRY,
            model="lenet-strided-bn",
            seed=4,
            buffers_return=returned,
        )
        found = evidence_for(captured.seen, "adaptive")
        own = coefficients(captured)["features.1.gamma"]
        read = found.buffers["features.1.gamma"]
        torch.testing.assert_close(read, sign * own, atol=2e-3, rtol=0)
        assert found.notes["lock_sign"] == f"taken from {taken}"


@pytest.mark.parametrize(
    ("count", "model", "entry", "settings"),
    [
        (2, "lenet-strided-bn", ENTRY, {}),
        (1, "lenet-bn", ENTRY, {}),
        (1, "lenet-strided-bn", {**ENTRY, "blocks": "every"}, {}),
        (1, "lenet-strided-bn", ENTRY, {"steps": 2}),
    ],
    ids=["two images", "pooling", "every block", "two steps"],
)
def test_what_is_not_read_in_closed_form_is_searched(
    digits: Any, count: Any, model: Any, entry: Any, settings: Any
) -> None:
    captured = locked(digits, count, entry, model, **settings)
    assert evidence_for(captured.seen, "adaptive").buffers == {}
    problem = problem_of(captured.seen)
    assert set(problem.unknowns()) == set(coefficients(captured))


def test_a_lock_that_does_not_explain_the_update_is_not_taken(digits: Any) -> None:
    captured = locked(digits)
    noise = torch.Generator().manual_seed(0)
    loud = {
        name: value + 0.05 * value.std() * torch.randn(value.shape, generator=noise)
        for name, value in captured.seen.update.items()
    }
    assert evidence_for(replace(captured.seen, update=loud), "adaptive").buffers == {}


def test_returned_statistics_tell_the_brightness_that_the_gradient_hides(digits: Any) -> None:
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
def test_the_fast_path_of_a_locked_model_agrees_with_vmap(digits: Any, model: Any) -> None:
    captured = locked(digits, 2, {"name": "fedkl", "blocks": "every"}, model, buffers_return=True)
    problem = problem_of(captured.seen, restarts=2).to(torch.float64)
    images = torch.rand(2, 2, 1, 16, 16, dtype=torch.float64)
    labels = torch.full((2, 2, 10), 0.1, dtype=torch.float64)
    unknowns = {n: v.detach().to(torch.float64) for n, v in problem.unknowns().items()}
    assert problem.target_model.network is not None
    fast = problem.simulate(images, labels, unknowns)
    problem.target_model.network = None
    slow = problem.simulate(images, labels, unknowns)
    assert set(fast) == set(slow) > set(captured.seen.parameters)
    for name, value in slow.items():
        assert torch.allclose(fast[name], value, atol=1e-10), name


def test_two_observations_and_their_restarts_run_as_one_batch(digits: Any) -> None:
    seen = [locked(digits, seed=i, client=f"client-{i}").seen for i in (0, 1)]
    together = reconstruct(
        seen, IG(), budget=Budget(iterations=3, restarts=2), tier="adaptive", device="cpu"
    )
    alone = reconstruct(
        seen[1], IG(), budget=Budget(iterations=3, restarts=2), tier="adaptive", device="cpu"
    )
    assert isinstance(alone[0], Reconstruction)
    assert isinstance(together[1], Reconstruction)
    assert torch.allclose(together[1].images, alone[0].images, atol=1e-3)


@pytest.mark.parametrize(
    "what", [*(pytest.param(one, marks=pytest.mark.slow) for one in SECRETS[:2]), SECRETS[2]]
)
def test_a_known_secret_is_in_nothing_that_is_handed_back(tiny: Any, what: What) -> None:
    captured = locked(tiny, 2)
    lock = lock_of(captured)
    secrets = [*lock.tensors().values(), *lock.coefficients().values()]
    using = known(IG(), {captured.seen.key: lock}, what)
    found = using(captured.seen, budget=Budget(iterations=2))
    # Seconds, and few digits, may by chance be those of a secret.
    text = re.sub(r'"seconds": [\d.e-]+', "", found.record().model_dump_json()) + repr(using)
    for value in secrets:
        for number in value.flatten()[:50].tolist():
            assert f"{number:.8f}"[:-1] not in text
    assert found.attack == "known"
    assert found.settings["forward"]["held"] == what


def test_who_holds_secrets_takes_the_iterations_of_the_attack_that_he_runs(
    digits: Any, ticking: Any
) -> None:
    captured = locked(digits)
    quick = known(IG(), {captured.seen.key: lock_of(captured)})
    (found,) = quick.attack([captured.seen], AttackTask(budget=Budget(seconds=5.0)))
    assert not isinstance(found, Refusal)
    assert 1 < found.iterations <= 5


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rate": 2.0}, ("config-value", "rate")),
        ({"key_length": 0}, ("config-value", "key_length")),
        ({"blocks": "last"}, ("config-value", "blocks")),
        ({"secret": 1}, ("config-value", "secret")),
        ({"blocks": "every"}, ("model-mismatch", "features.4.bias")),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(
    digits: Any, changed: Any, reason: tuple[str, ...]
) -> None:
    seen = locked(digits).seen
    entry = {**seen.declaration.defenses[0], **changed}
    wrong = replace(seen, declaration=replace(seen.declaration, defenses=(entry,)))
    with refused(*reason):
        evidence_for(wrong, "adaptive")


def test_an_update_that_holds_the_lock_is_flagged(digits: Any) -> None:
    seen = locked(digits).seen
    leaked = replace(seen, update=seen.update | {"features.1.scale_fc.weight": torch.zeros(12)})
    with refused("declaration-wrong", "features.1.scale_fc.weight"):
        evidence_for(leaked, "adaptive")


def test_a_capture_of_the_plain_model_is_flagged(observe: Any, digits: Any) -> None:
    plain = observe(digits[0][:1], digits[1][:1], model="lenet-strided-bn", defenses=(ENTRY,))
    with refused("model-mismatch", "features.1.bias", "features.1.weight"):
        evidence_for(plain, "adaptive")


def test_a_capture_from_disk_gives_the_same_evidence(digits: Any, tmp_path: Path) -> None:
    seen = locked(digits, buffers_return=True).seen
    store = ObservationStore(tmp_path)
    loaded = store.load(store.save(seen))
    first, second = (evidence_for(o, "adaptive") for o in (seen, loaded))
    assert first.notes == second.notes
    assert all(torch.equal(v, second.target[n]) for n, v in first.target.items())


def test_the_weight_of_batch_statistics_is_no_trust_in_the_gradient(digits: Any) -> None:
    captured = locked(digits, buffers_return=True)
    case = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16)
    _, weights = statistics_to_match(captured.seen, case.target_model)
    assert case.evidence.weights is not None and weights
    assert set(case.evidence.weights) == set(weights)
    for name, value in weights.items():
        assert torch.equal(case.evidence.weights[name], value)
