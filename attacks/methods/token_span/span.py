"""Subspaces that gradients of linear layers span, and distances to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.errors import BractError

_GAP = 30.0
"""Ratio of neighbouring singular values from which on the smaller one counts as rounding."""

_STEEP = 2.0
"""Ratio of neighbouring singular values at which those of several local steps may be cut."""

_ROUNDING = 1e-8
"""Singular value, as a share of the largest, below which float32 gradients hold nothing."""

_OF_ROUNDS = 1e-7
"""The same for the joined gradients of an adapter over several rounds."""

_APART = 5.0
"""Ratio of neighbouring distances from which on they separate tokens that are there from others."""


_NOTHING_YET = (
    "the gradient of the first linear layers is zero; of adapters it is until their second factor "
    "has been trained"
)


@dataclass(frozen=True)
class Span:
    """Subspace of a layer's input space.

    Attributes
    ----------
    basis
        Orthonormal rows, float64 ``(rank, width)``.
    gap
        Ratio of the smallest singular value that was kept to the largest that was dropped.
    clean
        Whether the values fell to rounding by themselves, so that all that is in the layer's input
        lies in the subspace; False where noise hides a part.
    """

    basis: Tensor
    gap: float
    clean: bool = True

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return len(self.basis)

    @property
    def full(self) -> bool:
        """Return whether every vector lies in it, so that it tells nothing."""
        return self.rank >= self.basis.shape[1]

    def distance(self, inputs: Tensor) -> Tensor:
        """Return the share in [0, 1] of the norm of inputs ``(..., width)`` outside of it."""
        basis = self.basis.to(inputs.dtype)
        outside = inputs - (inputs @ basis.T) @ basis
        share: Tensor = outside.norm(dim=-1) / inputs.norm(dim=-1).clamp_min(1e-30)
        return share


def span_of(
    gradients: Sequence[Tensor],
    deviations: Sequence[Tensor | None] = (),
    *,
    relative: bool = False,
) -> Span:
    """Return the span of the rows of gradients ``(outputs, width)`` with one common input.

    The gradient of ``Y = X W^T`` is ``D^T X``: its rows lie in the span of the inputs X, and span
    it where the output gradients D of the tokens are independent (DAGER, Petrov et al., NeurIPS
    2024, theorem 5.1). The rank is where singular values fall to rounding. Where they do not, it
    is the number of values above those of noise, whose size is known or read off the smallest.

    Parameters
    ----------
    deviations
        Standard deviation of the noise in each row of each gradient, ``(outputs,)``; None where it
        is not known. A row whose deviation is infinite is left out.
    relative
        Whether deviations are known but for a common factor.

    Raises
    ------
    BractError
        If no value is above the noise, or all are.
    """
    known = [deviations[i] if i < len(deviations) else None for i in range(len(gradients))]
    pairs = [(g.double(), k) for g, k in zip(gradients, known, strict=True) if bool(g.any())]
    if not pairs:
        raise BractError(_NOTHING_YET, code="attack-evidence")
    weighed = all(deviation is not None for _, deviation in pairs)
    if weighed:
        # The noise then has the deviation 1 in all of them.
        joined = torch.cat([_standardised(g, k) for g, k in pairs if k is not None])
        floor = 0.0 if relative else sum(side**0.5 for side in joined.shape)
    else:
        joined = torch.cat([g / g.norm() for g, _ in pairs])
        floor = 0.0
    _, values, basis = torch.linalg.svd(joined, full_matrices=False)
    if not bool(values.any()):
        raise BractError(
            "no row of the first linear layers is known well enough", code="attack-unsolved"
        )
    held = values.clamp_min(max(_ROUNDING * float(values[0]), floor))
    ratios = held[:-1] / held[1:]
    falls = (ratios >= _GAP).nonzero().flatten().tolist()
    if falls:
        rank = falls[-1] + 1
        return Span(basis[:rank], float(ratios[rank - 1]), clean=not weighed or relative)
    if not weighed or relative:
        if len(values) < basis.shape[1]:
            return Span(basis, float("inf"))
        floor = _noise_of(values, joined.shape)
    above = int((values > floor).sum())
    if above == basis.shape[1] and weighed and not relative:
        # Several local steps: weights that have moved add fainter directions to those of the first.
        steepest = int(ratios.argmax())
        above = steepest + 1 if float(ratios[steepest]) >= _STEEP else above
    if 0 < above < basis.shape[1]:
        return Span(basis[:above], 1.0, clean=False)
    raise BractError(
        "the singular values of the first linear layers do not fall to rounding: noise, or at "
        f"least as many tokens as the {basis.shape[1]} dimensions of an embedding",
        code="attack-unsolved",
    )


def span_of_rounds(gradients: Sequence[Tensor]) -> Span:
    """Return the span of the rows of an adapter's gradients ``(ranks * rounds, width)``.

    Adapters move little from round to round, so that each round's directions outside of the earlier
    ones are fainter, without a gap, until float32 rounding covers them. All above rounding count.

    Raises
    ------
    BractError
        If all gradients are zero.
    """
    known = [g.double() for g in gradients if bool(g.any())]
    if not known:
        raise BractError(_NOTHING_YET, code="attack-evidence")
    joined = torch.cat([g / g.norm() for g in known])
    _, values, basis = torch.linalg.svd(joined, full_matrices=False)
    return Span(basis[values > _OF_ROUNDS * values[0]], float("inf"))


def _standardised(gradient: Tensor, deviation: Tensor) -> Tensor:
    kept = deviation.isfinite() & (deviation > 0.0)
    return gradient[kept] / deviation[kept].double()[:, None]


def _noise_of(values: Tensor, shape: Sequence[int]) -> float:
    """Return the largest singular value of noise that has the smallest quarter of the values.

    Those of a matrix of independent numbers depend on its shape alone (Marchenko and Pastur 1967);
    they are drawn here.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    noise = torch.linalg.svdvals(drawn)
    quarter = max(1, len(values) // 4)
    return float(noise[0] * values[-quarter:].median() / noise[-quarter:].median())


def separating(distances: Tensor, most: int) -> float | None:
    """Return a distance that separates what lies in a subspace from what does not; None if none.

    Chosen without the truth: the middle, on a logarithmic scale, of the widest gap among the
    ``most`` smallest distances.
    """
    smallest = distances.flatten().topk(min(most, distances.numel()), largest=False).values
    ordered = smallest.sort().values.clamp_min(1e-9)
    if len(ordered) < 2:
        return None
    ratios = ordered[1:] / ordered[:-1]
    at = int(ratios.argmax())
    if float(ratios[at]) < _APART:
        return None
    return float((ordered[at] * ordered[at + 1]).sqrt())
