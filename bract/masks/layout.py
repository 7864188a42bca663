"""Quantised values with guard bits, as words of whole bytes in which a weighted sum cannot wrap."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bract.masks.errors import MaskError
from bract.paillier.quantize import FixedPoint

Words = NDArray[np.unsignedinteger]
"""``uint32``, or ``uint64`` where a sum needs more than 32 bits."""


@dataclass(frozen=True)
class MaskLayout:
    """Form of a vector of values in a masked update; all clients of a run need the same one.

    A word holds ``weight * code`` of one value plus masks, modulo ``2^(8 word_bytes)``. The sum of
    all clients is at most ``max_weight * (2^bits - 2)``, which is below the modulus: what is left
    after unmasking is the sum itself.

    Attributes:
        length: Number of values.
        clip: Clip range of the fixed point.
        bits: Bits of a code, 2 to 32.
        max_weight: Largest sum of the clients' integer weights.
    """

    length: int
    clip: float
    bits: int = 16
    max_weight: int = 1

    @property
    def fixed_point(self) -> FixedPoint:
        """The quantisation of one value, as under `encryption: paillier`."""
        return FixedPoint(self.clip, self.bits)

    @property
    def word_bytes(self) -> int:
        """Bytes of a value on the wire: code and guard bits, rounded up."""
        return -(-(self.max_weight * self._top_code).bit_length() // 8)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector on the wire."""
        return self.length * self.word_bytes

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """In what words are computed with."""
        return np.dtype("<u4" if self.word_bytes <= 4 else "<u8")

    def encode(self, values: ArrayLike, weight: int) -> tuple[Words, int]:
        """Quantise values and multiply the codes by an integer weight.

        Args:
            values: Real numbers, ``length`` of them.
            weight: 1 to ``max_weight``.

        Returns:
            Words of shape ``(length,)``, and the number of values outside the clip range.

        Raises:
            MaskError: Another number of values, or a weight out of range.
            PaillierError: NaN or infinity among the values.
        """
        if not 1 <= weight <= self.max_weight:
            raise MaskError(f"a weight of {weight}, expected 1 to {self.max_weight}")
        codes, clipped = self.fixed_point.encode(values)
        if codes.shape != (self.length,):
            raise MaskError(f"{codes.size} values, expected {self.length}")
        words = codes.astype(self.dtype)
        words *= self.dtype.type(weight)
        return words, clipped

    def decode(self, sums: Words, weight: int) -> NDArray[np.float64]:
        """Return the weighted mean of values from the sum of weight times code.

        Raises:
            MaskError: A sum that no codes of this weight give: a client sent something else than
                its masked codes.
        """
        beyond = np.flatnonzero(sums > weight * self._top_code)
        if beyond.size:
            raise MaskError(
                f"{beyond.size} of {sums.size} sums are larger than clients of total weight "
                f"{weight} can give: a client sent no masked codes of {self.bits} bits, or was "
                "masked for other clients"
            )
        return self.fixed_point.decode(sums.astype(np.uint64), weight)

    def to_bytes(self, words: Words) -> NDArray[np.uint8]:
        """Return the words modulo ``2^(8 word_bytes)`` as bytes, ``(nbytes,)``."""
        table = words.astype(self.dtype, copy=False).view(np.uint8).reshape(self.length, -1)
        return np.ascontiguousarray(table[:, : self.word_bytes]).reshape(-1)

    def from_bytes(self, data: NDArray[np.uint8]) -> Words:
        """Read what `to_bytes` wrote."""
        if data.shape != (self.nbytes,):
            raise MaskError(f"{data.size} bytes, expected {self.nbytes} for {self.length} values")
        table = np.zeros((self.length, self.dtype.itemsize), dtype=np.uint8)
        table[:, : self.word_bytes] = data.reshape(self.length, self.word_bytes)
        return table.reshape(-1).view(self.dtype)

    def reduce(self, words: Words) -> Words:
        """Return words modulo ``2^(8 word_bytes)``."""
        return words & self.dtype.type((1 << (8 * self.word_bytes)) - 1)

    @property
    def _top_code(self) -> int:
        return 2 * self.fixed_point.levels
