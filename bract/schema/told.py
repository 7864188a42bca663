"""The information bound of an upload, in an audit result."""

from __future__ import annotations

from typing import ClassVar

from bract.schema.record import Record, names

HIDDEN = 3.0
"""Decibels above a guess without the upload below which no attack is worth trying. Chosen on noise
against strided LeNets of two initialisations: where the bound was nearer on average, the attacker
who knows the noise reached a mean SSIM of 0.03."""


class Told(Record):
    """The information bound of an upload; see `bract.attacks.problem.identifiability`.

    ``psnr``: dB that the best estimator can expect at most, near images that were made up;
    ``prior_psnr``: dB of a guess that sees no upload; ``numbers``: informative coordinates;
    ``pixels``: numbers of the images.
    """

    public: ClassVar[frozenset[str]] = names("psnr prior_psnr numbers pixels")

    psnr: float
    prior_psnr: float
    numbers: int
    pixels: int

    @property
    def hidden(self) -> bool:
        """Whether the best estimator can expect little more than a guess without the upload."""
        return self.psnr < self.prior_psnr + HIDDEN
