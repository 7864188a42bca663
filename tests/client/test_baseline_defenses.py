import importlib.util
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from flwr.supercore.differential_privacy import clip_inputs_inplace
from refusals import refused
from torch import nn

from bract.client.defenses import (
    Noise,
    ProtectContext,
    Pruning,
    build_defenses,
)
from bract_papers.defenses.soteria import Soteria, sensitivities

HERE = ProtectContext(seed=1)


def update(seed: Any = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(20, 10, generator=generator),
        "b": torch.randn(30, generator=generator),
    }


def test_pruning_drops_the_smallest_share_of_the_whole() -> None:
    values = {"w": torch.tensor([[5.0, -1.0], [0.5, 3.0]]), "b": torch.tensor([-2.0, 0.1])}
    sent = Pruning(ratio=0.5).protect(values, {}, HERE)
    assert sent["w"].tolist() == [[5.0, 0.0], [0.0, 3.0]]
    assert sent["b"].tolist() == [-2.0, 0.0]


def test_pruning_by_tensor_keeps_the_share_in_each() -> None:
    values = {"w": torch.tensor([5.0, 4.0, 3.0, 6.0]), "b": torch.tensor([0.2, 0.1])}
    sent = Pruning(ratio=0.5, scope="tensor").protect(values, {}, HERE)
    assert sent["w"].tolist() == [5.0, 0.0, 0.0, 6.0]
    assert sent["b"] == pytest.approx(torch.tensor([0.2, 0.0]))


def test_clipping_is_flowers_own() -> None:
    arrays = [v.numpy().copy() for v in update().values()]
    clip_inputs_inplace(arrays, 0.7)
    sent = Noise(clip=0.7, std=1e-12).protect(update(), {}, HERE)
    for ours, theirs in zip(sent.values(), arrays, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-8)


def test_an_update_within_the_bound_is_not_stretched() -> None:
    sent = Noise(clip=1e6, std=1e-12).protect(update(), {}, HERE)
    torch.testing.assert_close(sent["w"], update()["w"])


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_noise_has_the_configured_spread_and_shape(kind: Any) -> None:
    zeros = {"w": torch.zeros(200_000)}
    noise = Noise(kind=kind, clip=None, std=0.25).protect(zeros, {}, HERE)["w"]
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    # Kurtosis: 3 for the normal, 6 for the Laplace distribution.
    kurtosis = float((noise / noise.std()).pow(4).mean())
    assert kurtosis == pytest.approx(3.0 if kind == "gaussian" else 6.0, rel=0.1)


def test_noise_is_fresh_every_round_and_unpredictable_without_the_seed() -> None:
    defense = Noise(clip=None, std=1.0)
    zeros = {"w": torch.zeros(5)}

    def draw(context: Any) -> Any:
        return tuple(defense.protect(zeros, {}, context)["w"].tolist())

    contexts = [
        ProtectContext(round=1, seed=3),
        ProtectContext(round=2, seed=3),
        ProtectContext(round=1),
        ProtectContext(round=1),
    ]
    assert len({draw(c) for c in contexts}) == 4
    assert draw(contexts[0]) == draw(contexts[0])


@pytest.mark.parametrize("entry", [{"std": 0.3}, {"epsilon": 8.0}, {"epsilon": 8.0, "clip": 0.1}])
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_every_value_sent_lies_on_a_grid_that_does_not_depend_on_the_update(
    kind: Any, entry: Any
) -> None:
    defense = Noise(kind=kind, **entry)
    grid = defense.grid
    assert grid is not None and math.log2(grid).is_integer()
    assert 2**30 <= defense.deviation / grid < 2**31
    for seed, dtype in ((0, torch.float32), (1, torch.float64)):
        values = {name: 3.7 * value.to(dtype) for name, value in update(seed).items()}
        for value in defense.protect(values, {}, HERE).values():
            steps = value.double() / grid
            assert torch.equal(steps, steps.round()) and value.dtype == dtype


@pytest.mark.parametrize(("kind", "order"), [("gaussian", 2), ("laplace", 1)])
def test_rounding_to_the_grid_never_lengthens_what_was_clipped(
    kind: Any, order: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Noise, "_noise", lambda self, count, grid, stream: 0)
    for seed in range(20):
        # The sensitivity holds exactly, so the norm is computed without rounding.
        defense = Noise(kind=kind, clip=0.7, epsilon=1.0 + seed)
        values = {name: value.double() for name, value in update(seed).items()}
        sent = torch.cat([v.flatten() for v in defense.protect(values, {}, HERE).values()])
        norm = sum(abs(Fraction(v)) ** order for v in sent.tolist())
        assert Fraction(0.7) ** order * Fraction(999, 1000) < norm <= Fraction(0.7) ** order
        assert float(sent.abs().max()) > 0


def test_noise_that_is_nothing_beside_the_clip_is_refused() -> None:
    with refused("config-value", "clip"):
        build_defenses([{"name": "noise", "std": 1e-30, "clip": 1.0}])


def test_the_smallest_updates_noise_is_the_same_as_the_largest() -> None:
    defense = Noise(std=0.5, clip=1.0)
    noise = []
    for size in (0.0, 1e-30, 1e-3, 1e6):
        values = torch.zeros(1000, dtype=torch.float64)
        values[0] = size
        noise.append(defense.protect({"w": values}, {}, HERE)["w"][1:])
    assert all(torch.equal(noise[0], other) for other in noise[1:])


def test_gaussian_noise_gives_the_epsilon_it_was_calibrated_for_and_rounds_add_up() -> None:
    defense = Noise(clip=2.0, epsilon=1.5, delta=1e-6)
    assert defense.spent(1) == pytest.approx(1.5)
    # By hand: rho = (2 C)^2 / (2 sigma^2); T rounds cost T rho + 2 sqrt(T rho ln(1/delta)).
    rho = 16.0 / (2 * defense.deviation**2)
    assert defense.spent(9) == pytest.approx(9 * rho + 2 * math.sqrt(9 * rho * math.log(1e6)))
    spent = defense.spent(9)
    assert spent is not None and 1.5 * 3 < spent < 1.5 * 9
    state: dict[str, Any] = {}
    for _ in range(9):
        defense.protect(update(), state, HERE)
    assert defense.report["epsilon_spent"] == pytest.approx(defense.spent(9))


def test_known_answer_of_the_gaussian_mechanism() -> None:
    # rho = 1/2 at sigma = sensitivity: 1/2 + 2 sqrt(ln(1e5) / 2) = 5.2985.
    assert Noise(clip=0.5, std=1.0, delta=1e-5).spent(1) == pytest.approx(5.29853, abs=1e-5)


def test_laplace_noise_clips_in_the_norm_its_guarantee_is_for() -> None:
    defense = Noise(kind="laplace", clip=3.0, epsilon=2.0)
    assert defense.deviation == pytest.approx(math.sqrt(2) * 2 * 3.0 / 2.0)
    assert defense.spent(4) == 8.0
    quiet = Noise(kind="laplace", clip=3.0, epsilon=1e9).protect(update(), {}, HERE)
    assert float(sum(v.abs().sum() for v in quiet.values())) == pytest.approx(3.0, rel=1e-4)
    assert Noise(kind="laplace", std=0.1).spent(1) is None


def small_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 3)
    )


def test_soteria_zeroes_the_columns_of_the_features_that_tell_least_per_size() -> None:
    model = small_model()
    images = torch.rand(4, 1, 4, 4)
    update = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    context = ProtectContext(model=model, images=images)
    sent = Soteria(ratio=0.5).protect(update, {}, context)
    # The slow way: the full Jacobian of the features, example by example.
    model.eval()
    head = model[:4]
    scores = torch.zeros(6)
    for image in images:
        slope = torch.autograd.functional.jacobian(head, image[None])[0].flatten(1)
        scores += slope.norm(dim=1) / head(image[None])[0].detach().abs()
    torch.testing.assert_close(sensitivities(model, "4", images), scores)
    lowest = set(scores.argsort()[:3].tolist())
    for f in range(6):
        assert bool((sent["4.weight"][:, f] == 0).all()) == (f in lowest)
    untouched = [n for n in update if n != "4.weight"]
    assert all(torch.equal(sent[n], update[n]) for n in untouched)


def test_soteria_leaves_mode_and_gradients_of_the_model_alone() -> None:
    model = small_model().train()
    model[1].eval()
    model(torch.rand(4, 1, 4, 4)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    statistics = model[2].running_mean.clone()
    sensitivities(model, "4", torch.rand(4, 1, 4, 4))
    assert model.training and model[2].training and not model[1].training
    assert torch.equal(model[2].running_mean, statistics)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


def test_soteria_refuses_an_update_without_the_last_layer() -> None:
    context = ProtectContext(model=small_model(), images=torch.rand(1, 1, 4, 4))
    with refused("defense-failed", "4.weight"):
        Soteria().protect({"1.weight": torch.ones(6, 16)}, {}, context)


def test_opacus_keeps_the_account_where_it_is_installed_and_asked_for() -> None:
    entry = {"name": "noise", "epsilon": 1.0, "accountant": "opacus"}
    if importlib.util.find_spec("opacus") is None:
        with refused("package-missing", "bract[opacus]"):
            build_defenses([entry])
        return
    (ours,) = build_defenses([{"name": "noise", "epsilon": 1.0}]).defenses
    (theirs,) = build_defenses([entry]).defenses
    assert isinstance(ours, Noise) and isinstance(theirs, Noise)
    assert theirs.deviation == ours.deviation
    for rounds in (1, 10):
        # Both bound the same mechanism; the Renyi conversion is the tighter of the two.
        bound, spent = ours.spent(rounds), theirs.spent(rounds)
        assert bound is not None and spent is not None
        assert 0.7 * bound < spent <= bound
