from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bract import Observation
from bract.attacks import GRNN, Budget
from bract.attacks.adaptive.adadefense.inversion import Inversion, invert
from bract.attacks.adaptive.adadefense.moments import (
    DefendedUpdate,
    Moments,
    largest_defended_update,
)
from bract.attacks.adaptive.adadefense.trust import ENOUGH, NOISE, trust
from bract.attacks.task import evidence_for
from bract.client.defenses import AdaDefense, build_defenses
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.schema import ClientDeclaration
from bract.scores import psnr

PLACES = ["inside", "outside", "uncorrected"]


def vector(values: Any, number: Any = 1, **hyper: Any) -> Any:
    """An observation with one tensor, sent by the real defense after `number` equal rounds."""
    chain = build_defenses([{"name": "adadefense", **hyper}])
    state: dict[str, Any] = {}
    rounds = []
    values = values if isinstance(values, list) else [values] * number
    for r, value in enumerate(values, 1):
        sent = chain.protect({"w": value.float()}, state)
        rounds.append(
            Observation(
                round=r,
                client="c",
                parameters={"w": torch.zeros_like(value, dtype=torch.float32)},
                update=sent,
                declaration=ClientDeclaration(algorithm="fedsgd", defenses=tuple(chain.public())),
            )
        )
    return rounds


def defended(clean: Any, **hyper: Any) -> Any:
    chain = build_defenses([{"name": "adadefense", **hyper}])
    state: dict[str, Any] = {}
    return [
        replace(
            seen,
            round=r,
            update=chain.protect(seen.update, state),
            declaration=replace(seen.declaration, defenses=tuple(chain.public())),
        )
        for r, seen in enumerate(clean, 1)
    ]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("inside", 7.5e-5), ("outside", 1.5e-8), ("uncorrected", 1.5e-8 / 1e-3**0.5)],
)
def test_a_defended_update_of_three_fifths_comes_from_a_gradient_known_by_hand(
    place: Any, expected: Any
) -> None:
    seen = Observation(
        round=1,
        client="c",
        parameters={"w": torch.zeros(2)},
        update={"w": torch.tensor([0.6, -0.6], dtype=torch.float64)},
        declaration=ClientDeclaration(
            defenses=({"name": "adadefense", "alpha_at": "server", "eps_placement": place},)
        ),
    )
    found = invert(AdaDefense(alpha_at="server", eps_placement=place), seen, Moments.zero(2))
    assert found.g.tolist() == pytest.approx([expected, -expected], rel=1e-9)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("alpha_at", ["client", "server"])
@settings(deadline=None, max_examples=25)
@given(
    logs=st.lists(st.floats(-12, 1), min_size=4, max_size=40),
    seed=st.integers(0, 100),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.9, 0.99, 0.999]),
    corrected=st.booleans(),
    variant=st.sampled_from(["adam", "adagrad", "yogi"]),
)
def test_first_round_coordinates_lie_within_their_bounds(
    place: Any,
    alpha_at: Any,
    logs: Any,
    seed: Any,
    beta1: Any,
    beta2: Any,
    corrected: Any,
    variant: Any,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (len(logs),), generator=generator) * 2 - 1
    g = (sign * 10.0 ** torch.tensor(logs, dtype=torch.float64)).float()
    hyper = {
        "eps_placement": place,
        "alpha_at": alpha_at,
        "beta1": beta1,
        "beta2": beta2,
        "bias_correction": corrected,
        "variant": variant,
    }
    (seen,) = vector(g, **hyper)
    found = invert(AdaDefense(**hyper), seen, Moments.zero(len(g)))
    off = (found.g - g.double()).abs()
    assert bool((off <= found.error)[found.resolved].all())
    assert bool((found.g.sign() == g.sign()).all())


def test_what_float32_resolves_depends_on_where_epsilon_stands() -> None:
    g = torch.tensor([1e-6, 1e-4, 1e-2, 10.0])
    place: Any
    for place, expected in [
        ("inside", [True, True, True, False]),
        ("outside", [True, True, False, False]),
    ]:
        (seen,) = vector(g, eps_placement=place)
        found = invert(AdaDefense(eps_placement=place), seen, Moments.zero(4))
        assert found.resolved.tolist() == expected


@pytest.mark.parametrize("place", PLACES)
def test_later_rounds_are_replayed_within_their_bounds(place: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    size = 10.0 ** (torch.rand(4000, generator=generator) * 6 - 7)
    first = size * torch.randn(4000, generator=generator)
    gradients = [first + 0.3 * size * torch.randn(4000, generator=generator) for _ in range(4)]
    seen = vector(gradients, eps_placement=place)
    before, previous = Moments.zero(4000), None
    for r, observation in enumerate(seen):
        found = invert(AdaDefense(eps_placement=place), observation, before, previous)
        off = (found.g - gradients[r].double()).abs()
        assert bool((off <= found.error)[found.resolved].all()), r
        assert float(found.resolved.double().mean()) > 0.04, r
        before, previous = found.after, found.g


def test_adagrad_is_replayed_and_yogi_refused_after_the_first_round() -> None:
    g = torch.tensor([1e-6, -1e-5, 1e-5, 3e-5])
    seen = vector(g, 2, variant="adagrad")
    assert torch.allclose(
        evidence_for(seen[1], "adaptive", seen[:1]).target["w"], g, rtol=1e-3, atol=0
    )
    seen = vector(g, 2, variant="yogi")
    assert evidence_for(seen[0], "adaptive").notes["resolved"] == 1.0
    with refused("attack-unsuited", "yogi"):
        evidence_for(seen[1], "adaptive", seen[:1])


def test_both_candidates_reproduce_the_defended_update() -> None:
    before = Moments(1, *(torch.tensor([x], dtype=torch.float64) for x in (1e-3, 1e-7, 0, 0)))
    step = DefendedUpdate(AdaDefense(), before)
    t = step.slopes(torch.tensor([5e-3], dtype=torch.float64)).value
    found, valid = step.candidates(t)
    assert bool(valid.all())
    assert float((found[0] - found[1]).abs()) > 1e-3
    for root in found:
        assert float(step.slopes(root).value) == pytest.approx(float(t), rel=1e-9)


def test_the_slope_and_curvature_are_those_of_the_map() -> None:
    place: Any
    for place in PLACES:
        before = Moments(1, *(torch.tensor([x], dtype=torch.float64) for x in (1e-4, 2e-9, 0, 0)))
        step = DefendedUpdate(AdaDefense(eps_placement=place), before)
        g = torch.tensor([3e-4], dtype=torch.float64)
        up, here, down = (step.slopes(g + h) for h in (1e-8, 0.0, -1e-8))
        assert float(here.g) == pytest.approx(float((up.value - down.value) / 2e-8), rel=1e-5)
        assert float(here.gg) == pytest.approx(float((up.g - down.g) / 2e-8), rel=1e-4)


def test_the_largest_defended_update_is_reached_by_the_gradients_of_cauchy_schwarz() -> None:
    assert largest_defended_update(AdaDefense(), 1) == pytest.approx(1.0)
    assert largest_defended_update(AdaDefense(bias_correction=False), 1) == pytest.approx(
        0.1 / 0.001**0.5
    )
    # g_k proportional to u_k / s_k = (0.9 / 0.999)^k for the k-th latest
    g = [torch.tensor([0.9 / 0.999]), torch.tensor([1.0])]
    seen = vector(g, alpha_at="server")
    assert float(seen[1].update["w"]) == pytest.approx(
        largest_defended_update(AdaDefense(), 2), rel=1e-5
    )


def test_evidence_is_scaled_after_inversion_and_labels_come_from_signs(
    observe: Any, digits: Any
) -> None:
    for i in range(3):
        clean = observe(digits[0][i : i + 1], digits[1][i : i + 1], steps=1, lr=0.05)
        (seen,) = defended([clean])
        found = evidence_for(seen, "adaptive")
        assert found.labels is not None
        assert found.labels.tolist() == digits[1][i : i + 1].tolist()
        assert found.weights is not None
        assert found.notes["resolved"] > 0.5
        for name, value in clean.gradient().items():
            sure = found.weights[name] > 0.9
            assert torch.allclose(found.target[name][sure], value[sure], rtol=0.2, atol=1e-3)


def test_returned_weights_leave_less_resolution_than_a_sent_update(
    observe: Any, digits: Any
) -> None:
    (seen,) = defended([observe(digits[0][:1], digits[1][:1])], alpha=1e-3)
    rounded = {n: w - (w - seen.update[n]) for n, w in seen.parameters.items()}
    returned = replace(seen, update=rounded)
    sent, back = evidence_for(seen, "adaptive"), evidence_for(returned, "adaptive")
    assert back.notes["resolved"] < sent.notes["resolved"]


def test_an_update_above_the_bound_is_flagged(observe: Any, digits: Any) -> None:
    (seen,) = defended([observe(digits[0][:1], digits[1][:1])])
    wrong = replace(seen.declaration, defenses=({"name": "adadefense", "alpha": 0.001},))
    with refused("declaration-wrong", 10, 1):
        evidence_for(replace(seen, declaration=wrong), "adaptive")
    raw = replace(seen, update={n: v * 1e4 for n, v in seen.update.items()})
    with refused("declaration-wrong", "declaration.defenses"):
        evidence_for(raw, "adaptive")


def test_an_unknown_hyper_parameter_is_named(observe: Any, digits: Any) -> None:
    seen = observe(digits[0][:1], digits[1][:1], defenses=({"name": "adadefense", "betal": 1},))
    with refused("config-value", "betal"):
        evidence_for(seen, "adaptive")


def test_a_missing_first_round_is_said_and_estimated() -> None:
    generator = torch.Generator().manual_seed(0)
    g = 1e-3 * torch.randn(2000, generator=generator)
    seen = vector([g * (1 + 0.1 * i) for i in range(3)])
    found = evidence_for(seen[2], "adaptive", seen[1:2])
    assert found.notes["state"].startswith("estimated: rounds before 2 were not captured")
    late = replace(vector(g)[0], round=4)
    assert "took part first in round 4" in evidence_for(late, "adaptive").notes["state"]


def test_history_of_another_client_or_defense_is_refused() -> None:
    seen = vector(torch.tensor([1e-5, 1e-4]), 2)
    with refused("attack-unsuited", "client"):
        evidence_for(seen[1], "adaptive", [replace(seen[0], client="d")])
    other = replace(seen[0].declaration, defenses=({"name": "adadefense", "alpha": 0.02},))
    with refused("attack-unsuited", "defenses"):
        evidence_for(seen[1], "adaptive", [replace(seen[0], declaration=other)])


@pytest.mark.thorough
def test_the_adaptive_attacker_sees_the_digit_that_the_oblivious_one_misses(observe: Any) -> None:
    images, labels = load_test_data(DataConfig(name="digits", image_size=32))
    (seen,) = defended([observe(images[:1], labels[:1], init="default")])
    budget = Budget(iterations=150)
    scores = {}
    for tier in ("oblivious", "adaptive"):
        found = GRNN(labels="infer")(seen, tier=tier, budget=budget)
        scores[tier] = float(psnr(found.images, images[:1])[0])
    assert scores["adaptive"] > scores["oblivious"] + 6


def test_a_small_bare_update_is_flagged_by_the_balance_of_its_last_bias(
    observe: Any, digits: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    small = {name: 1e-3 * value for name, value in clean.update.items()}
    declared = {"name": "adadefense"}
    bare = replace(
        clean, update=small, declaration=replace(clean.declaration, defenses=({**declared},))
    )
    with refused("declaration-wrong", "declaration.defenses"):
        evidence_for(bare, "adaptive")
    assert evidence_for(defended([clean])[0], "adaptive").notes["resolved"] > 0.5


def test_trust_lets_no_more_noise_in_than_wanted_unless_too_few_coordinates_are_left() -> None:
    size = torch.logspace(-6, 0, 1000, dtype=torch.float64)
    open_ = torch.zeros(1000, dtype=torch.bool)

    def noise(inverted: Any, weights: Any) -> Any:
        typical = (weights * (0.15 * inverted.error).square()).sum()
        return float((typical / (weights * size.square()).sum()).sqrt())

    unused: Any = None
    small = Inversion(g=size, error=0.02 * size.square(), ambiguous=open_, after=unused)
    assert noise(small, trust(small)) <= NOISE
    large = replace(small, error=5.0 * size.square())
    kept = trust(large)
    assert noise(large, kept) > NOISE
    assert float(kept.sum() ** 2 / kept.square().sum()) >= ENOUGH * int(large.resolved.sum())
    exact = replace(small, error=torch.zeros(1000, dtype=torch.float64))
    assert torch.equal(trust(exact), torch.ones(1000, dtype=torch.float64))


@pytest.mark.parametrize(
    ("hyper", "rounds"),
    [
        ({}, 1),
        ({"secret_updates": 1, "beta2": 0.9}, 1),
        ({"variant": "adagrad", "eps_placement": "outside", "epsilon": 0.1}, 2),
        ({"bias_correction": False, "eps_placement": "uncorrected", "epsilon": 0.01}, 3),
    ],
)
def test_the_simulation_of_secret_updates_is_the_mean_of_what_clients_send(
    hyper: Any, rounds: int
) -> None:
    hyper = {"secret_updates": 3, **hyper}
    some, copies = torch.tensor([0.0, 0.3, -1.0, 4.0]), 4000
    seen = vector(some.repeat(copies), rounds, **hyper)
    found = evidence_for(seen[-1], "adaptive", seen[:-1])
    assert found.adapt is not None
    client = found.adapt(cast(Any, lambda *_: {"w": some.repeat(copies)[None]}), 1)
    expected = client(*(cast(Any, None),) * 6)["w"].reshape(copies, 4)[0]
    sent = found.target["w"].reshape(copies, 4)
    error = sent.std(dim=0) / copies**0.5
    # Over 64 secrets the mean itself is not exact.
    assert (expected - sent.mean(dim=0)).abs().le(5 * error + 0.1 * sent.std(dim=0)).all()
    assert float(expected[0].abs()) < 1e-6


def test_a_chain_before_secret_updates_has_no_adaptive_attacker_and_says_so() -> None:
    (seen,) = vector(torch.tensor([0.3, -1.0]), secret_updates=1)
    entries = ({"name": "pruning", "ratio": 0.5}, *seen.declaration.defenses)
    chained = replace(seen, declaration=replace(seen.declaration, defenses=entries))
    with refused("attack-unsuited", "pruning", "secret_updates"):
        evidence_for(chained, "adaptive")
    (yogi,) = vector(torch.tensor([0.3, -1.0]), secret_updates=1, variant="yogi")
    with refused("attack-unsuited", "variant", "yogi", "secret_updates"):
        evidence_for(yogi, "adaptive")


def test_pruning_after_secret_updates_is_matched_where_coordinates_survived() -> None:
    (seen,) = vector(torch.tensor([0.3, -1.0, 2.0, 0.1]), secret_updates=1)
    entries = (*seen.declaration.defenses, {"name": "pruning", "ratio": 0.5})
    update = {"w": seen.update["w"] * torch.tensor([0.0, 1.0, 1.0, 0.0])}
    chained = replace(seen, update=update, declaration=replace(seen.declaration, defenses=entries))
    found = evidence_for(chained, "adaptive")
    assert found.adapt is not None and found.bounds is not None
    assert (found.bounds["w"] > 0).tolist() == [True, False, False, True]
