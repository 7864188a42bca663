from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from defended_clients import capture

from bract.attacks import Budget, attack
from bract.attacks.adaptive.weak_locks import lock_seed
from bract.attacks.adaptive.weak_seeds import Drawn, first_words, prefixes
from bract.attacks.result import SeedBudget
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext, build_defenses
from bract.crypto import SecretStream
from bract.defenses import Noise
from bract.models.keylock import Lock
from bract.updates.update import flatten, unflatten

WAYS = [
    Drawn(dtype=dtype, layout=layout)
    for dtype in (torch.float32, torch.float64)
    for layout in ("one vector", "tensor by tensor")
]
FEW = SeedBudget(candidates=1 << 14)


def clipped(update: Any, hyper: Any) -> Any:
    vector = flatten(update).double()
    order = 1 if hyper.kind == "laplace" and hyper.epsilon is not None else 2
    norm = float(torch.linalg.vector_norm(vector, ord=order))
    return vector * min(1.0, hyper.clip / norm) if hyper.clip else vector


def careless(clean: Any, seed: Any, way: Any, sign: Any = 1.0, **settings: Any) -> Any:
    """A deployment that clips as it should and draws its noise from a seeded torch generator."""
    hyper = Noise(**settings)
    vector = clipped(clean.update, hyper)
    vector = vector + sign * hyper.deviation * way.noise(hyper.kind, seed, clean.update)
    entry = hyper.public()
    return replace(
        clean,
        update=unflatten(vector, clean.update),
        declaration=replace(clean.declaration, defenses=(entry,)),
    ), unflatten(clipped(clean.update, hyper), clean.update)


def searched(seen: Any, budget: Any = FEW) -> Any:
    return evidence_for(seen, "adaptive", weak_seeds=budget)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_seeds_at_once_give_what_torch_draws_under_each(kind: Any, dtype: Any) -> None:
    seeds = np.array([0, 5, 12345, 2**31, 2**32 - 1], dtype=np.uint32)
    found = prefixes(kind, first_words(seeds, 192), 96, dtype)
    for column, seed in zip(found.T, seeds.tolist(), strict=True):
        drawn = Drawn(dtype=dtype, layout="one vector").noise(kind, seed, {"w": torch.zeros(200)})
        np.testing.assert_allclose(column, drawn[:96].numpy(), rtol=1e-4, atol=1e-4)


def test_the_twister_is_numpys_own() -> None:
    state = np.random.RandomState(4321)
    expected = state.randint(0, 2**32, 227, dtype=np.uint64)
    assert first_words(np.array([4321], dtype=np.uint32), 227)[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_noise_from_a_small_torch_seed_is_removed_exactly(
    observe: Any, digits: Any, kind: Any, way: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen, truth = careless(clean, 3210, way, kind=kind, epsilon=8.0)
    found = searched(seen)
    assert found.notes["weak_seed"] == 3210
    if kind == "gaussian":  # Uniform numbers come out the same in either layout.
        assert found.notes["weak_seed_search"]["drawn"] == str(way)
    scale = float(flatten(seen.update).abs().max())
    for name, value in truth.items():
        factor = found.notes.get("factor") or 1.0
        torch.testing.assert_close(found.target[name] / factor, value, atol=1e-6 * scale, rtol=0)


def test_seed_bits_that_torch_drops_do_not_hide_it(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen, _ = careless(clean, 77 + 2**40, WAYS[0], epsilon=8.0, sign=-1.0)
    assert searched(seen).notes["weak_seed"] == 77


def test_bracts_own_noise_is_not_found_under_the_same_seed(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    chain = build_defenses([{"name": "noise", "epsilon": 8.0}])
    for seed in (7, None):
        update = chain.protect(clean.update, {}, ProtectContext(seed=seed))
        seen = replace(
            clean,
            update=update,
            declaration=replace(clean.declaration, defenses=tuple(chain.public())),
        )
        found = searched(seen)
        assert found.notes["weak_seed"] is None
        assert found.notes["weak_seed_search"]["tried"] == FEW.candidates


def test_seeds_out_of_reach_are_not_found_unless_their_range_is_known(
    observe: Any, digits: Any
) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen, _ = careless(clean, 3_000_000_123, WAYS[2], std=0.5)
    assert searched(seen).notes["weak_seed"] is None
    known = SeedBudget(seeds=(range(3_000_000_000, 3_000_008_000),))
    assert searched(seen, known).notes["weak_seed"] == 3_000_000_123
    assert searched(seen, SeedBudget(candidates=0)).notes["weak_seed_search"]["tried"] == 0


def test_dates_and_seeds_of_round_and_client_are_among_the_first(observe: Any, digits: Any) -> None:
    clean = replace(observe(digits[0][:1], digits[1][:1]), round=12, client="client-34")
    for seed in (20240229, 12034, 120034, 340012):
        seen, _ = careless(clean, seed, WAYS[0], std=0.5)
        assert searched(seen, SeedBudget(candidates=1 << 17)).notes["weak_seed"] == seed


def test_quiet_noise_takes_more_of_the_update_to_tell(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    strong = float(flatten(clean.update).double().square().mean()) ** 0.5
    seen, _ = careless(clean, 40, WAYS[0], std=0.3 * strong, clip=None)
    found = searched(seen)
    assert found.notes["weak_seed"] == 40
    hopeless, _ = careless(clean, 40, WAYS[0], std=1e-4 * strong, clip=None)
    assert searched(hopeless).notes["weak_seed_search"]["tried"] == 0


def test_a_seed_that_leaves_more_than_the_clip_is_no_find(observe: Any, digits: Any) -> None:
    clean = observe(digits[0][:1], digits[1][:1])
    seen, truth = careless(clean, 99, WAYS[0], epsilon=8.0)
    norm = float(flatten(truth).double().norm())
    entry = seen.declaration.defenses[0]
    deviation = Noise(**{k: v for k, v in entry.items() if k != "name"}).deviation
    tight = {"name": "noise", "std": deviation, "clip": 0.5 * norm}
    wrong = replace(seen, declaration=replace(seen.declaration, defenses=(tight,)))
    assert searched(wrong).notes["weak_seed"] is None


@pytest.mark.parametrize("relu", [True, False])
def test_a_key_and_lock_from_a_small_torch_seed_are_found_from_gamma_and_beta(
    observe: Any, digits: Any, relu: Any
) -> None:
    seen = observe(digits[0][:1], digits[1][:1])
    layers, settings = (("first", 6), ("second", 9)), {"key_length": 64, "relu": relu}

    def lock(seed: Any) -> Any:
        drawn = Lock.draw(
            dict(layers), 64, relu=relu, source=torch.Generator().manual_seed(seed)
        ).coefficients()
        return {
            name: value + 0.004 * torch.randn(value.shape, generator=torch.Generator())
            for name, value in drawn.items()
        }

    found = lock_seed(seen, lock(700 + 2**40), 1e-6, FEW, layers=layers, **settings)
    assert found["weak_seed"] == 700
    rough = lock_seed(seen, lock(700), 0.3, FEW, layers=layers, **settings)
    assert rough["weak_seed"] is None and rough["weak_seed_search"]["tried"] == 0
    fresh = Lock.draw(dict(layers), 64, relu=relu, source=SecretStream.derived(700))
    # Behind the ReLU a value of zero says one bit, and six of them fit one seed in 64.
    few = {"first.gamma": torch.zeros(3), "first.beta": torch.zeros(3)}
    blank = lock_seed(seen, few, 1e-6, FEW, layers=(("first", 3),), **settings)
    assert blank["weak_seed"] is None
    assert (blank["weak_seed_search"]["tried"] == 0) is relu
    missed = lock_seed(seen, fresh.coefficients(), 1e-6, FEW, layers=layers, **settings)
    assert missed["weak_seed"] is None and missed["weak_seed_search"]["tried"] == 1 << 10


@pytest.mark.thorough
def test_an_attack_that_explains_the_update_tells_the_seed_of_the_lock(
    tiny: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        ProtectContext, "stream", lambda self, purpose: torch.Generator().manual_seed(19 + 2**32)
    )
    captured = capture(
        tiny[0][:1],
        tiny[1][:1],
        {"name": "fedkl"},
        model="lenet-strided-bn",
        init="uniform",
        buffers_return=True,
    )
    budget = Budget(iterations=50)
    found = attack("best")(captured.seen, budget=budget, tier="adaptive")
    assert found.settings["evidence"]["weak_seed"] == 19
    assert "weak_seed" not in attack("best")(captured.seen, budget=budget).settings["evidence"]
