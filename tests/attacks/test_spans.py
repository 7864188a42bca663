"""Row spaces of gradients: how many dimensions count, and how noise tilts them."""

from __future__ import annotations

import torch

from bract.attacks.reading import span as spans
from bract.attacks.reading import spectrum


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return slopes ``(40, 3)`` and rows ``(3, 20)`` whose product is a gradient."""
    generator = torch.Generator().manual_seed(0)
    slopes, rows = (torch.randn(*shape, generator=generator) for shape in ((40, 3), (3, 20)))
    return slopes.double(), rows.double()


def test_a_distance_is_the_share_of_the_norm_outside() -> None:
    span = spans.Span(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    inputs = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(span.distance(inputs), torch.tensor([0.8], dtype=torch.float64))
    assert torch.allclose(span.residual(inputs), inputs.new_tensor([[0.0, 0.8, 0.0]]))


def test_a_rank_counts_what_is_above_a_share_and_a_floor() -> None:
    """Of the values 8, 4 and 1: by hand."""
    seen = spectrum.Spectrum.of(torch.diag(torch.tensor([1.0, 8.0, 4.0]))[:, [1, 2, 0]])
    assert seen.values.tolist() == [8.0, 4.0, 1.0]
    assert seen.rank() == 3
    assert seen.rank(share=0.2) == 2
    assert seen.rank(share=0.2, floor=5.0) == 1
    assert seen.rank(floor=0.5, most=2) == 2
    assert seen.holds(3, 0.2, of=2)
    assert not seen.holds(3, 0.2)
    assert not seen.holds(4, 0.0)
    assert seen.edge(0.5) == 0.5 * 2.0 * 3.0**0.5
    assert spectrum.Spectrum.of(torch.zeros(0, 3)).rank(share=1e-6) == 0


def test_complements_are_orthogonal_and_dependent_rows_are_seen() -> None:
    rows = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)
    others = spectrum.complement(rows)
    assert others.shape == (2, 3)
    assert float((others @ rows.T).abs().max()) < 1e-12
    assert spectrum.independent(torch.eye(2), 0.5)
    assert not spectrum.independent(torch.ones(2, 2), 1e-6)
    shortest = spectrum.shortened_most(torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]))
    assert torch.allclose(shortest.abs(), torch.tensor([0.0, 1.0]))


def test_what_is_taken_out_of_a_span_is_gone() -> None:
    span = spans.Span(torch.eye(3, dtype=torch.float64)[:2])
    left = span.without(torch.eye(3, dtype=torch.float64)[1:2])
    assert torch.allclose(left.basis.abs(), torch.eye(3, dtype=torch.float64)[:1])


def test_noise_alone_spans_nothing() -> None:
    noise = torch.randn(60, 30, generator=torch.Generator().manual_seed(1)).double()
    assert spans.span_under_noise(0.1 * noise, 0.1).rank == 0


def test_residuals_under_noise_have_the_mean_square_that_many_draws_have() -> None:
    """The first-order tilt of `Span.residual`, against spans of 200 draws of the noise."""
    slopes, rows = factors()
    deviation, generator = 0.01, torch.Generator().manual_seed(2)
    squares = []
    for _ in range(200):
        noise = deviation * torch.randn(40, 20, generator=generator).double()
        span = spans.span_under_noise(slopes @ rows + noise, deviation)
        assert span.rank == 3
        squares.append(span.residual(rows).square().sum(dim=1) / span.room)
    found = torch.stack(squares)
    # A mean of 17 squared normals has the deviation sqrt(2 / 17); of 200 of them 0.024.
    assert float((found.mean(dim=0) - 1.0).abs().max()) < 0.1
    assert 0.25 < float(found.std(dim=0).mean()) < 0.45
