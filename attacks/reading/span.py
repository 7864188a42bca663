"""The row space of a layer's gradient, in which what entered the layer lies.

The gradient of ``y = W h`` is ``L^T H`` for the rows h that entered, so they lie in its row space,
which they span where the slopes L are independent. How many dimensions count is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.reading.spectrum import OVER_EDGE, Spectrum
from bract.attacks.result import Determined
from bract.errors import BractError

GAP = 30.0
"""Ratio of neighbouring singular values from which on the smaller one counts as rounding."""

_STEEP = 2.0
"""Ratio of neighbouring singular values at which those of several local steps may be cut."""

_ROUNDING = 1e-8
"""Singular value, as a share of the largest, below which float32 gradients hold nothing."""

_OF_ROUNDS = 1e-7
"""The same for the joined gradients of an adapter over several rounds."""

_LEFT = 1e-3
"""Length from which on what is left of a subspace's direction counts."""

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
    spread
        float64 ``(rank,)``: noise of the gradient over each singular value that was kept, by which
        the subspace is tilted; None where the gradient is exact.
    """

    basis: Tensor
    gap: float = float("inf")
    clean: bool = True
    spread: Tensor | None = None

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return len(self.basis)

    @property
    def room(self) -> int:
        """Dimensions outside of it: equations for whatever entered."""
        return self.basis.shape[1] - self.rank

    @property
    def full(self) -> bool:
        """Return whether every vector lies in it, so that it tells nothing."""
        return not self.room

    @property
    def certificate(self) -> Determined:
        """Certify each row that entered: by the fall of its values."""
        return Determined(self.room, 1.0 / self.gap, 1.0 if not self.clean else 1.0 / GAP)

    def outside(self, inputs: Tensor) -> Tensor:
        """Return the part of inputs ``(..., width)`` outside of it."""
        basis = self.basis.to(inputs.dtype)
        return inputs - (inputs @ basis.T) @ basis

    def without(self, taken: Tensor) -> Span:
        """Return the part of it that is orthogonal to orthonormal rows ``(k, width)``."""
        rest = Spectrum.of(self.basis - (self.basis @ taken.T) @ taken)
        return Span(rest.right[: rest.rank(floor=_LEFT)])

    def distance(self, inputs: Tensor) -> Tensor:
        """Return the share in [0, 1] of the norm of inputs ``(..., width)`` outside of it."""
        share: Tensor = self.outside(inputs).norm(dim=-1) / inputs.norm(dim=-1).clamp_min(1e-30)
        return share

    def residual(self, inputs: Tensor) -> Tensor:
        """Return what is outside of it in units of its size, ``(..., width)``.

        That is the norm of each input where the gradient is exact. Under noise it is the deviation
        that the tilt of the subspace gives each coordinate of an input that entered: to first order
        an input ``sum_k c_k v_k`` is off by ``-sum_k c_k u_k^T E / s_k`` for noise E, so by
        ``sigma |(c_k / s_k)_k|`` in every direction outside (Stewart and Sun 1990, V.2). The
        squares of an input that entered then add up to `room` on average.
        """
        outside = self.outside(inputs)
        if self.spread is None:
            unit = inputs.norm(dim=-1, keepdim=True)
        else:
            inside = (inputs @ self.basis.to(inputs.dtype).T) * self.spread.to(inputs)
            unit = inside.norm(dim=-1, keepdim=True)
        found: Tensor = outside / unit.clamp_min(1e-12)
        return found


def span_above(gradient: Tensor, share: float, most: int | None = None) -> Span:
    """Return the span of the singular values above a share of the largest, ``most`` at most.

    Parameters
    ----------
    gradient
        float64 ``(outputs, width)``.
    """
    seen = Spectrum.of(gradient)
    return Span(seen.right[: seen.rank(share=share, most=most)])


def span_under_noise(gradient: Tensor, deviation: float) -> Span:
    """Return the span of the singular values that white noise alone does not make.

    Those do not exceed `Spectrum.edge`.

    Parameters
    ----------
    gradient
        float64 ``(outputs, width)``.
    deviation
        Standard deviation of the noise in each coordinate.
    """
    seen = Spectrum.of(gradient)
    rank = seen.rank(floor=OVER_EDGE * seen.edge(deviation))
    return Span(seen.right[:rank], clean=False, spread=deviation / seen.values[:rank])


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
    else:
        joined = torch.cat([g / g.norm() for g, _ in pairs])
    seen = Spectrum.of(joined)
    values, basis = seen.values, seen.right
    floor = seen.edge(1.0) if weighed and not relative else 0.0
    if not bool(values.any()):
        raise BractError(
            "no row of the first linear layers is known well enough", code="attack-unsolved"
        )
    held = values.clamp_min(max(_ROUNDING * float(values[0]), floor))
    ratios = held[:-1] / held[1:]
    falls = (ratios >= GAP).nonzero().flatten().tolist()
    if falls:
        rank = falls[-1] + 1
        return Span(basis[:rank], float(ratios[rank - 1]), clean=not weighed or relative)
    if not weighed or relative:
        if len(values) < basis.shape[1]:
            return Span(basis, float("inf"))
        floor = _noise_of(values, joined.shape)
    above = seen.rank(floor=floor)
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
    return span_above(torch.cat([g / g.norm() for g in known]), _OF_ROUNDS)


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
    noise = Spectrum.of(drawn).values
    quarter = max(1, len(values) // 4)
    return float(noise[0] * values[-quarter:].median() / noise[-quarter:].median())
