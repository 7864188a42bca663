"""Sparse vectors of a subspace: against factors worked by hand and an exhaustive search."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from bract.attacks.methods.spear.low_rank import Subspace, factors
from bract.attacks.methods.spear.sparse_directions import SparseSearch, inside


def layer(units: int, features: int, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight with bias (M, n + 1), inputs with a one (B, n + 1), and L of a random loss (B, M)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(units, features + 1, generator=generator, dtype=torch.float64)
    inputs = torch.randn(batch, features + 1, generator=generator, dtype=torch.float64)
    inputs[:, -1] = 1.0
    on = (inputs @ weight.T > 0).to(torch.float64)
    return weight, inputs, on * torch.randn(batch, units, generator=generator, dtype=torch.float64)


def searched(gradient: Tensor, weight: Tensor, batch: int, rounds: int = 60) -> SparseSearch:
    space = Subspace.of(gradient, batch)
    search = SparseSearch(space, weight, torch.Generator().manual_seed(0))
    for _ in search.rounds():
        if search.rounds_done >= rounds:
            break
    return search


def exhaustive(space: Subspace) -> list[Tensor]:
    """Every ``rank - 1`` entries that can be zero together, sparsest vectors first, by hand."""
    vectors = []
    for rows in combinations(range(len(space.left)), space.rank - 1):
        direction = torch.linalg.svd(space.left[list(rows)], full_matrices=True)[2][-1]
        vectors.append(space.left @ direction)
    vectors.sort(key=lambda v: int((v.abs() > 1e-8).sum()))
    kept: list[Tensor] = []
    for vector in vectors:
        joint = torch.stack([*kept, vector])
        if float(torch.linalg.svdvals(joint)[-1]) > 1e-6:
            kept.append(vector)
        if len(kept) == space.rank:
            break
    return kept


def test_two_examples_by_hand() -> None:
    # x = (1, 0) and (0, 2) with a one for the bias. Units 0 and 1 see the first alone, 2 and 3
    # the second alone, 4 both: W x + b is (1, 2, -1, -1, 1) and (-1, -1, 1, 3, 2).
    weight = torch.tensor(
        [[1.0, -0.5, 0.0], [1.0, -1.0, 1.0], [-1.0, 0.5, 0.0], [-2.0, 1.0, 1.0], [0.5, 0.75, 0.5]]
    ).double()
    # Rows (2, -1, 0, 0, 1) and (0, 0, 3, 1, -1) of L, times x: dW is
    gradient = torch.tensor(
        [[2.0, 0.0, 2.0], [-1.0, 0.0, -1.0], [0.0, 6.0, 3.0], [0.0, 2.0, 1.0], [1.0, -2.0, 0.0]]
    ).double()
    search = searched(gradient, weight, 2)
    assert search.done
    inputs, rows = factors(search.space, search.found)
    order = inputs[:, 0].argsort(descending=True)
    assert torch.allclose(inputs[order], torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double())
    expected = torch.tensor([[2.0, -1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0, -1.0]]).double()
    assert torch.allclose(rows[order], expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_an_exhaustive_one_finds(seed: int) -> None:
    weight, inputs, rows = layer(40, 8, 3, seed)
    search = searched(rows.T @ inputs, weight, 3)
    assert search.done
    found = torch.stack([search.space.left @ d.coefficients for d in search.found])
    slow = torch.stack([v / v.norm() for v in exhaustive(search.space)])
    assert torch.allclose((slow @ found.T).abs().amax(dim=1), torch.ones(3).double(), atol=1e-9)


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_the_factors_are_the_layer_s_own(batch: int) -> None:
    weight, inputs, rows = layer(150, 60, batch, 7)
    search = searched(rows.T @ inputs, weight, batch)
    assert search.done
    found, left = factors(search.space, search.found)
    order = torch.cdist(inputs[:, :-1], found).argmin(dim=1)
    assert torch.allclose(found[order], inputs[:, :-1], atol=1e-8)
    live = (rows != 0).any(dim=0)
    assert torch.allclose(left[order], rows[:, live], atol=1e-8)


def test_a_vector_that_no_input_makes_is_not_believed() -> None:
    weight, inputs, rows = layer(150, 60, 4, 7)
    space = Subspace.of(rows.T @ inputs, 4)
    search = SparseSearch(space, weight, torch.Generator().manual_seed(0))
    true = torch.linalg.lstsq(space.left, rows.T[space.live]).solution.T
    mixed = true[0] / true[0].norm() - true[1] / true[1].norm()
    search._take(torch.stack([mixed / mixed.norm(), true[2] / true[2].norm()]))
    assert len(search.found) == 1
    assert (
        float(torch.cosine_similarity(search.found[0].coefficients, true[2], dim=0).abs()) > 0.999
    )


def test_rounding_does_not_count_as_rank() -> None:
    _, inputs, rows = layer(150, 60, 5, 7)
    exact = (rows.T @ inputs).float()
    assert Subspace.of(exact, 9).rank == 5


def test_the_middle_of_a_quadrant_and_of_nothing() -> None:
    middle = inside(torch.eye(2).double(), None)
    assert middle is not None and middle.tolist() == pytest.approx([1.0, 1.0])
    assert inside(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double(), None) is None
    along = inside(torch.eye(2).double(), torch.tensor([[1.0, -1.0]]).double())
    assert along is not None and along.tolist() == pytest.approx([1.0, 1.0])


def test_one_wrong_vector_is_put_right_by_all_others() -> None:
    weight, inputs, rows = layer(150, 60, 6, 7)
    search = searched(rows.T @ inputs, weight, 6)
    right = search.found[0]
    mixed = right.coefficients - 0.5 * search.found[1].coefficients
    search.found[0] = replace(right, coefficients=mixed / mixed.norm())
    assert not search._consistent()
    next(search.rounds())
    assert search.done
    cosines = torch.stack([d.coefficients for d in search.found]) @ right.coefficients
    assert float(cosines.abs().max()) == pytest.approx(1.0, abs=1e-9)
