"""Factors whose zeros noise blurs: against rows that are known, and slow references."""

import math

import pytest
import torch
from torch import Tensor

from bract.attacks.methods.spear import sparse_directions
from bract.attacks.methods.spear.gated_vectors import fitted
from bract.attacks.methods.spear.likely_images import common_scale
from bract.attacks.methods.spear.low_rank import Subspace
from bract.attacks.methods.spear.noisy_factors import Layer, alternate, unmixed
from bract.attacks.methods.spear.noisy_search import NoisySearch
from bract.attacks.methods.spear.sparse_directions import grams, products_of, unit

UNITS, FEATURES, BATCH = 150, 60, 5


def factored(seed: int, deviation: float) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's weight (M, n + 1), inputs in [-1, 1] with a one, and L^T X plus noise."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(UNITS, FEATURES + 1, generator=generator, dtype=torch.float64)
    inputs = 2 * torch.rand(BATCH, FEATURES + 1, generator=generator, dtype=torch.float64) - 1
    inputs[:, -1] = 1.0
    on = (inputs @ weight.T > 0).to(torch.float64)
    rows = on * torch.randn(BATCH, UNITS, generator=generator, dtype=torch.float64)
    noise = torch.randn(UNITS, FEATURES + 1, generator=generator, dtype=torch.float64)
    return weight, inputs, rows.T @ inputs + deviation * noise


def layer_of(space: Subspace, weight: Tensor) -> Layer:
    end = torch.ones(FEATURES, dtype=torch.float64)
    return Layer(weight @ space.right.T, float(weight.norm()) / math.sqrt(UNITS), -end, end)


def test_only_singular_values_above_the_edge_of_the_noise_count() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 100, generator=generator, dtype=torch.float64)
    assert Subspace.under(noise, 5, 1.0).rank == 0
    # sqrt(200) + sqrt(100) is 24.1.
    one = torch.zeros(200, 100, dtype=torch.float64)
    one[0, 0] = 60.0
    assert Subspace.under(noise + one, 5, 1.0).rank == 1


def test_a_mixture_settles_on_the_row_next_to_it() -> None:
    weight, inputs, gradient = factored(1, 0.02)
    space = Subspace.under(gradient, BATCH, 0.02)
    true = unit(space.values * torch.linalg.inv(inputs @ space.right.T).T)
    generator = torch.Generator().manual_seed(2)
    near = unit(true + 0.05 * torch.randn(BATCH, BATCH, generator=generator).double())
    found = fitted(space, weight @ space.right.T, near)
    before, after = ((c * true).sum(dim=1).square() for c in (near, found.coefficients))
    assert float((1 - after).mean()) < 0.2 * float((1 - before).mean())
    assert float(found.agreement.min()) > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_a_search_explains_the_gradient_to_its_noise(seed: int) -> None:
    weight, inputs, gradient = factored(seed, 0.02)
    space = Subspace.under(gradient, BATCH, 0.02)
    search = NoisySearch(space, layer_of(space, weight), torch.Generator().manual_seed(0))
    for _ in search.rounds():
        if search.rounds_done > 60:
            break
    assert search.best is not None and search.best.misfit == pytest.approx(1.0, abs=0.2)
    entering = search.best.inputs @ space.right
    entering = entering / entering[:, -1:]
    order = torch.cdist(inputs, entering).argmin(dim=1)
    assert sorted(order.tolist()) == list(range(BATCH))
    assert float((entering[order] - inputs).abs().mean()) < 0.01


def test_a_blend_of_two_inputs_is_taken_apart() -> None:
    weight, inputs, gradient = factored(3, 1e-4)
    space = Subspace.under(gradient, BATCH, 1e-4)
    layer = layer_of(space, weight)
    blended = inputs @ space.right.T
    blended[0] += 0.5 * blended[1]
    wrong = alternate(space, layer, blended)
    assert wrong is not None
    right = unmixed(space, layer, wrong)
    entering = right.inputs @ space.right
    assert float((entering / entering[:, -1:] - inputs).abs().max()) < 1e-2
    assert right.cost < wrong.cost or wrong.misfit < 1.2


def test_gram_matrices_are_the_same_where_products_are_too_many_to_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, 30, generator=generator, dtype=torch.float64)
    held = grams(left, products_of(left), weights)
    monkeypatch.setattr(sparse_directions, "_MOST_PRODUCTS", 1)
    assert products_of(left) is None
    assert torch.allclose(grams(left, products_of(left), weights), held)
    assert torch.allclose(held[1], left.T @ weights[1].diag() @ left)


def test_one_scale_is_kept_only_where_shares_are_alike_to_the_noise() -> None:
    rows = torch.ones(3, 100, dtype=torch.float64)
    alike = torch.tensor([0.24, 0.25, 0.26], dtype=torch.float64)
    assert torch.allclose(common_scale(alike, rows, 0.1) * alike, torch.full((3,), 0.25).double())
    twice = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert torch.equal(common_scale(twice, rows, 0.1), torch.ones(3, dtype=torch.float64))


def test_inputs_are_moved_into_their_range_at_the_scale_of_their_bias() -> None:
    weight, inputs, gradient = factored(4, 1e-4)
    space = Subspace.under(gradient, BATCH, 1e-4)
    layer = layer_of(space, weight)
    true = inputs @ space.right.T
    assert torch.allclose(layer.within(space, 3.0 * true), 3.0 * true, atol=1e-3)
    far = true.clone()
    far[0] += 0.8 * (true[0] - true[1])
    moved = layer.within(space, far)
    assert float((moved - true)[0].norm()) < float((far - true)[0].norm())


def test_a_wrong_row_among_right_ones_is_sought_again() -> None:
    weight, inputs, gradient = factored(5, 0.02)
    space = Subspace.under(gradient, BATCH, 0.02)
    search = NoisySearch(space, layer_of(space, weight), torch.Generator().manual_seed(0))
    start = inputs @ space.right.T
    start[2] = torch.randn(BATCH, generator=torch.Generator().manual_seed(1)).double()
    search.best = alternate(space, search.layer, start)
    assert search.best is not None and search.best.misfit > 2.0
    while not search.done and search._repair():
        pass
    assert search.best.misfit == pytest.approx(1.0, abs=0.2)


def test_a_search_of_one_row_whose_time_is_over_ends_without_factors() -> None:
    weight, _, gradient = factored(6, 0.02)
    space = Subspace.under(gradient, 1, 0.02)
    assert space.rank == 1
    generator = torch.Generator().manual_seed(0)
    search = NoisySearch(space, layer_of(space, weight), generator, stop=lambda: True)
    assert list(search.rounds()) == [] and search.best is None
