"""Secret random numbers: a ChaCha20 keystream, and exact samplers on the integers.

Noise, keys and lock layers must not be guessed. `torch.Generator` on a CPU is a Mersenne Twister
that takes the low 32 bits of its seed, so an observer of its output tries all seeds; besides, its
normal numbers are rounded floating-point values, whose low bits reveal what they were added to
(Mironov 2012, "On significance of the least significant bits for differential privacy"). Here the
bits come from a cipher under 256 bits of key, and noise is drawn as whole numbers from exactly the
discrete Gaussian or Laplace distribution (Canonne, Kamath and Steinke 2020, "The discrete Gaussian
for differential privacy"), for values that were rounded to whole numbers before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

_Words = NDArray[np.uint64]
_Whole = NDArray[np.int64]
_Real = NDArray[np.float64]
_Flags = NDArray[np.bool_]

KEY_BYTES = 32
_CHUNK = 1 << 15
"""Draws at a time: what they need stays in the processor's cache."""

_BITS = 52
"""Bits of a uniform number that are drawn at first; more follow where they decide."""

_ERROR = 2.0**-45
"""More than float64 arithmetic here can be wrong by; nearer decisions are made exactly."""

_NORMAL_STEPS = 2.0**24
"""Steps of the grid of `SecretStream.normal` in one standard deviation."""


class SecretStream:
    """A stream of secret random numbers; a copy of it is the stream itself.

    Two streams of one key give the same numbers on any machine: where floating-point arithmetic
    would decide between two outcomes too close to call, the decision is made exactly.

    Parameters
    ----------
    key
        32 bytes; see `fresh` and `derived`.

    Raises
    ------
    ValueError
        If the key has another length.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes, expected {KEY_BYTES}")
        self._key = key
        self._draws = {0: 0, 1: 0}

    @classmethod
    def fresh(cls) -> SecretStream:
        """Return a stream under a key from the operating system."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def derived(cls, seed: int, *purpose: str | int) -> SecretStream:
        """Return the stream of a private seed for one purpose, by HKDF with SHA-256.

        Every bit of ``seed``, however long, and every part of ``purpose`` matters. A stream is as
        secret as its seed.
        """
        info = "".join(f"{len(text)}:{text}" for text in map(str, purpose))
        kdf = HKDF(
            algorithm=hashes.SHA256(),
            length=KEY_BYTES,
            salt=b"bract private seed 1",
            info=info.encode(),
        )
        return cls(kdf.derive(str(int(seed)).encode()))

    def child(self, *purpose: str | int) -> SecretStream:
        """Return a stream for one purpose that depends on this one's key alone.

        It is the same however much was drawn from this stream or from other children.
        """
        info = "".join(f"{len(text)}:{text}" for text in map(str, purpose))
        kdf = HKDF(
            algorithm=hashes.SHA256(),
            length=KEY_BYTES,
            salt=b"bract child stream 1",
            info=info.encode(),
        )
        return SecretStream(kdf.derive(self._key))

    def bytes(self, count: int) -> bytearray:
        """Return the next ``count`` bytes."""
        return self._draw(count, 0)

    def words(self, count: int) -> _Words:
        """Return the next ``count`` whole numbers in [0, 2^64)."""
        return np.frombuffer(self.bytes(8 * count), dtype="<u8").astype(np.uint64, copy=False)

    def uniform(
        self,
        shape: Sequence[int],
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return ``low + (high - low) * k / 2^b``, k uniform in [0, 2^b).

        b is the number of bits that ``dtype`` holds exactly below 1 (24 for float32).
        """
        bits = min(53, 1 - round(math.log2(torch.finfo(dtype).eps)))
        steps = self.words(math.prod(shape)) >> np.uint64(64 - bits)
        unit = torch.from_numpy(steps.astype(np.float64) * 2.0**-bits).reshape(*shape)
        return (low + (high - low) * unit).to(dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return standard normal numbers: the discrete Gaussian on multiples of 2^-24."""
        steps = self.discrete_gaussian(math.prod(shape), _NORMAL_STEPS)
        return (steps.to(torch.float64) / _NORMAL_STEPS).reshape(*shape).to(dtype)

    def discrete_gaussian(self, count: int, sigma: float) -> Tensor:
        """Return int64 ``(count,)`` with ``P(x)`` proportional to ``exp(-x^2 / (2 sigma^2))``.

        Blocks of ``width`` numbers are proposed with weights ``exp(-rate * block)``, a number
        within uniformly, and the number is accepted with the probability that is left of its
        weight, about 0.7 (for a rate of 1/8 and a width of 1/8 of sigma).

        Raises
        ------
        ValueError
            If ``sigma`` is not in [2^-6, 2^40].
        """
        if not 2.0**-6 <= sigma <= 2.0**40:
            raise ValueError(f"sigma is {sigma!r}, expected a number in [2^-6, 2^40]")
        exponent = math.frexp(sigma)[1] - 1
        bits = max(0, exponent - 3)
        rate = 2.0 ** (bits - exponent)
        width = float(1 << bits)
        middle, twice = rate * sigma * sigma / width, 2.0 * sigma * sigma

        def propose(size: int) -> tuple[_Whole, _Flags]:
            words = self.words(3 * size).reshape(3, size)
            blocks = self._geometric(words[0] >> np.uint64(64 - _BITS), rate)
            offset = (words[2] >> np.uint64(1)) & np.uint64((1 << bits) - 1)
            inside = offset.astype(np.int64)
            found = (blocks << bits) + inside
            negative = (words[2] & np.uint64(1)).astype(bool)
            reach = found - middle
            exponents = reach * reach / twice + inside * (rate / width)

            def exact(i: int) -> Fraction:
                square, slope = Fraction(sigma) ** 2, Fraction(rate) / (1 << bits)
                away = int(found[i]) - slope * square
                return away * away / (2 * square) + slope * int(inside[i])

            kept = self._happens(words[1] >> np.uint64(64 - _BITS), exponents, exact)
            kept &= ~(negative & (found == 0))
            return np.where(negative, -found, found), kept

        return _collect(count, propose)

    def discrete_laplace(self, count: int, scale: float) -> Tensor:
        """Return int64 ``(count,)`` with ``P(x)`` proportional to ``exp(-|x| / scale)``.

        Raises
        ------
        ValueError
            If ``scale`` is not in [2^-6, 2^40].
        """
        if not 2.0**-6 <= scale <= 2.0**40:
            raise ValueError(f"scale is {scale!r}, expected a number in [2^-6, 2^40]")

        def propose(size: int) -> tuple[_Whole, _Flags]:
            words = self.words(size)
            found = self._geometric(words >> np.uint64(64 - _BITS), 1 / Fraction(scale))
            negative = (words & np.uint64(1)).astype(bool)
            return np.where(negative, -found, found), ~(negative & (found == 0))

        return _collect(count, propose)

    def _geometric(self, prefixes: _Words, rate: float | Fraction) -> _Whole:
        """Return v with ``P(v >= j) = exp(-rate * j)``: how often the rate goes into ``-ln U``."""
        scale = float(1 / Fraction(rate))
        middles = prefixes.astype(np.int64) + 0.5
        depth = np.log(middles * 2.0**-_BITS)
        real: _Real = depth * -scale
        found = np.floor(real)
        # The bits that are still to come move -ln U by at most 1 / prefix.
        doubt = scale * (2.0**-48 * (1.0 - depth) + 1.0 / np.maximum(middles - 0.5, 2.0**-60))
        close = (real - found < doubt) | (found + 1.0 - real < doubt)
        values = found.astype(np.int64)
        for i in np.flatnonzero(close):
            values[i] = self._geometric_exactly(int(prefixes[i]), Fraction(rate), int(values[i]))
        return values

    def _geometric_exactly(self, prefix: int, rate: Fraction, near: int) -> int:
        uniform = _Uniform(prefix, self._more)
        value = near
        while value > 0 and not uniform.below(rate * value):
            value -= 1
        while uniform.below(rate * (value + 1)):
            value += 1
        return value

    def _happens(
        self, prefixes: _Words, exponents: _Real, exact: Callable[[int], Fraction]
    ) -> _Flags:
        """Return whether U < exp(-exponent); ``exact`` gives an exponent without rounding."""
        middles = (prefixes.astype(np.int64) + 0.5) * 2.0**-_BITS
        gap = np.exp(-exponents) - middles
        happens: _Flags = gap > 0.0
        for i in np.flatnonzero(np.abs(gap) < _ERROR):
            happens[i] = _Uniform(int(prefixes[i]), self._more).below(exact(int(i)))
        return happens

    def _more(self) -> int:
        """Return 64 bits from a keystream of their own, so that the others stay in step."""
        return int.from_bytes(self._draw(8, 1), "little")

    def _draw(self, count: int, lane: int) -> bytearray:
        # Each draw has a nonce of its own: the block counter starts at 0, lane and number follow.
        number = self._draws[lane]
        self._draws[lane] += 1
        nonce = bytes(4) + lane.to_bytes(4, "little") + number.to_bytes(8, "little")
        stream = bytearray(count)
        Cipher(algorithms.ChaCha20(self._key, nonce), mode=None).encryptor().update_into(
            bytes(count), stream
        )
        return stream

    def __copy__(self) -> SecretStream:
        # A second stream in the same state would repeat this one's numbers.
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretStream:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret stream is neither stored nor sent")


Source = torch.Generator | SecretStream
"""Source of random numbers: torch's generator for what is no secret, a stream for secrets."""


def uniform_from(source: Source, shape: Sequence[int], low: float, high: float) -> Tensor:
    """Return float32 uniform numbers from either kind of source."""
    if isinstance(source, SecretStream):
        return source.uniform(shape, low, high)
    return torch.empty(*shape).uniform_(low, high, generator=source)


class _Uniform:
    """A uniform real number in [0, 1), of which as many bits are known as were asked for."""

    def __init__(self, prefix: int, more: Callable[[], int]) -> None:
        self._known = prefix
        self._bits = _BITS
        self._more = more

    def below(self, exponent: Fraction) -> bool:
        """Return whether it is less than ``exp(-exponent)``; an exponent of 0 gives True."""
        if exponent <= 0:
            return True
        while True:
            low, high = _exp_between(-exponent, self._bits)
            if Fraction(self._known + 1, 1 << self._bits) <= low:
                return True
            if Fraction(self._known, 1 << self._bits) >= high:
                return False
            self._known = (self._known << 64) | self._more()
            self._bits += 64


def _exp_between(power: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Return bounds of ``exp(power)`` for a power of at most 0, less than ``2^-bits`` apart."""
    with localcontext() as context:
        digits = context.prec = bits // 3 + 20
        # The quotient is off by its last digit, which the exponential multiplies by the power.
        whole = len(str(abs(power.numerator // power.denominator)))
        context.prec = digits + whole
        value = Fraction((Decimal(power.numerator) / Decimal(power.denominator)).exp())
    error = value * Fraction(1, 10 ** (digits - 3))
    return max(Fraction(0), value - error), value + error


def _collect(count: int, propose: Callable[[int], tuple[_Whole, _Flags]]) -> Tensor:
    """Return the first ``count`` proposals that were accepted, in order."""
    found = np.empty(count, dtype=np.int64)
    held = 0
    while held < count:
        values, kept = propose(min(_CHUNK, (count - held) * 3 // 2 + 16))
        accepted = values[kept][: count - held]
        found[held : held + len(accepted)] = accepted
        held += len(accepted)
    return torch.from_numpy(found)
