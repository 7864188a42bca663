"""Many codes in one plaintext: slots with room for a weighted sum."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier.errors import (
    CapacityError,
    CiphertextError,
    PaillierError,
    UndecryptableError,
)
from bract.paillier.quantize import FixedPoint

MOST_DEGREE = 8
"""Largest degree: ciphertexts hardly shrink beyond, and every operation's cost is cubic in it."""

_SLOT_LIMIT = 62  # sums are 64-bit signed integers after unpacking


@dataclass(frozen=True)
class Layout:
    """Positions of a vector's values in plaintexts; sender, server and receiver need the same one.

    A slot holds the sum of weight times code for one value. Codes end at ``2^bits - 2`` and the
    weights sum to at most ``max_weight``, so ``slot_bits``, the size of the product of the two,
    makes an overflow into the next slot impossible. ``slot_bits - bits`` of them are guard bits.

    Attributes:
        length: Number of values.
        clip: Clip range of the fixed point.
        bits: Bits of a code.
        max_weight: Largest allowed sum of the integer weights, not the number of clients.
        key_bits: Size of the key's ``n``.
        degree: Damgård-Jurik degree ``s``. A ciphertext is ``(s+1)/s`` times its plaintext: 1 is
            Paillier, which ``phe`` reads; 2 saves a quarter of the bytes at the same speed.
    """

    length: int
    clip: float
    bits: int = 16
    max_weight: int = 1
    key_bits: int = 2048
    degree: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "max_weight", "degree"):
            if getattr(self, name) < 1:
                raise PaillierError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.degree > MOST_DEGREE:
            raise PaillierError(f"degree must be at most {MOST_DEGREE}, found {self.degree}")
        available = min(_SLOT_LIMIT, self.plain_bits)
        if self.slot_bits > available:
            raise CapacityError(
                f"{self.bits} bits a value and weights up to a sum of {self.max_weight} need slots "
                f"of {self.slot_bits} bits, but {available} is the most: take at most "
                f"{max(available - self.max_weight.bit_length(), 0)} bits a value, or a sum of "
                f"weights of at most {((1 << available) - 1) // self._top_code}"
            )

    @property
    def fixed_point(self) -> FixedPoint:
        """The quantisation of one value."""
        return FixedPoint(self.clip, self.bits)

    @property
    def plain_bits(self) -> int:
        """Bits of a plaintext that every ``n`` of this size offers."""
        return self.degree * (self.key_bits - 1)

    @property
    def cipher_bytes(self) -> int:
        """Bytes of one ciphertext."""
        return ((self.degree + 1) * self.key_bits + 7) // 8

    @property
    def slot_bits(self) -> int:
        """Bits of one slot: code and guard bits."""
        return (self.max_weight * self._top_code).bit_length()

    @property
    def slots(self) -> int:
        """Values in one ciphertext."""
        return self.plain_bits // self.slot_bits

    @property
    def rows(self) -> int:
        """Ciphertexts of the whole vector."""
        return -(-self.length // self.slots)

    @property
    def _top_code(self) -> int:
        return 2 * self.fixed_point.levels

    def require(self, weights: Sequence[int]) -> int:
        """Return the sum of integer weights, after checking that it fits.

        Raises:
            CapacityError: The sum exceeds ``max_weight``.
            PaillierError: No weights, a negative one, or all zero.
        """
        total = sum(weights)
        if not weights or min(weights) < 0 or total == 0:
            raise PaillierError(
                f"weights must be non-negative integers with a positive sum, found {list(weights)}"
            )
        if total > self.max_weight:
            raise CapacityError(
                f"{len(weights)} weights sum to {total}, but slots of {self.slot_bits} bits for "
                f"{self.bits}-bit values were planned for a sum of at most {self.max_weight}: "
                f"plan the layout with max_weight={total}, or scale the weights down"
            )
        return total

    def to_fields(self) -> dict[str, Any]:
        """Return the attributes as JSON-ready fields."""
        return asdict(self)

    def pack(self, codes: NDArray[np.uint64]) -> list[Any]:
        """Put codes into plaintexts, the first code into the lowest bits of the first one.

        Args:
            codes: Shape ``(length,)``, each below ``2^bits``.

        Returns:
            ``rows`` integers (``mpz``) of at most ``plain_bits`` bits.

        Raises:
            PaillierError: Another number of codes, or a code out of range.
        """
        if codes.shape != (self.length,):
            raise PaillierError(f"expected {self.length} codes, found shape {codes.shape}")
        if int(codes.max()) > self._top_code:
            raise PaillierError(f"a code exceeds {self._top_code}: {int(codes.max())}")
        padded = np.zeros(self.rows * self.slots, dtype=np.uint64)
        padded[: self.length] = codes
        columns = np.ascontiguousarray(padded.reshape(self.rows, self.slots).T)
        words = np.zeros((self._words, self.rows), dtype="<u8")
        for slot, column in enumerate(columns):
            word, shift = divmod(slot * self.slot_bits, 64)
            words[word] |= column << np.uint64(shift)
            if shift + self.slot_bits > 64:
                words[word + 1] |= column >> np.uint64(64 - shift)
        return [gmpy2.mpz.from_bytes(row.tobytes(), "little") for row in words.T]

    def unpack(self, plaintexts: Sequence[Any], weight: int) -> NDArray[np.uint64]:
        """Take the sums out of decrypted plaintexts.

        Args:
            plaintexts: ``rows`` integers.
            weight: Sum of the weights that the ciphertexts carry.

        Returns:
            Shape ``(length,)``, sums of weight times code.

        Raises:
            UndecryptableError: A sum that no codes of this weight can give, or a used slot beyond
                the end: the ciphertext was altered, or its layout or weight is not the stated one.
        """
        size = self._words * 8
        if len(plaintexts) != self.rows:
            raise CiphertextError(f"expected {self.rows} plaintexts, found {len(plaintexts)}")
        for row, plaintext in enumerate(plaintexts):
            if plaintext.bit_length() > self.slots * self.slot_bits:
                raise UndecryptableError(self._implausible(row, weight))
        joined = b"".join(gmpy2.mpz(m).to_bytes(size, "little") for m in plaintexts)
        words = np.ascontiguousarray(
            np.frombuffer(joined, dtype="<u8").reshape(self.rows, self._words).T
        )
        columns = np.empty((self.slots, self.rows), dtype=np.uint64)
        mask = np.uint64((1 << self.slot_bits) - 1)
        for slot in range(self.slots):
            word, shift = divmod(slot * self.slot_bits, 64)
            column = words[word] >> np.uint64(shift)
            if shift + self.slot_bits > 64:
                column |= words[word + 1] << np.uint64(64 - shift)
            columns[slot] = column & mask
        sums = np.ascontiguousarray(columns.T).ravel()
        beyond = np.flatnonzero(sums > weight * self._top_code)
        tail = self.length + np.flatnonzero(sums[self.length :])
        wrong = np.concatenate([beyond, tail])
        if wrong.size:
            raise UndecryptableError(self._implausible(int(wrong[0]) // self.slots, weight))
        return sums[: self.length]

    @property
    def _words(self) -> int:
        return -(-self.plain_bits // 64)

    def _implausible(self, row: int, weight: int) -> str:
        return (
            f"ciphertext {row} decrypts to sums that {self.bits}-bit values of total weight "
            f"{weight} cannot give: it was altered, or its layout or weight is not the stated one"
        )
