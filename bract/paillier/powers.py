"""Powers and logarithms that know something: a fixed base, small exponents, ``u = 1 mod n``."""

from collections.abc import Sequence
from typing import Any

import gmpy2
from gmpy2 import mpz

TABLE_BYTES = 1 << 26
"""Most that the numbers of one table take; the largest models' tables have about that size."""

_MOST_WINDOW = 14


class FixedBase:
    """Powers of one base modulo one modulus, by a table of the powers of its windows of bits.

    One multiplication for each window of the exponent (fixed-base windowing, Brickell et al.
    1992). A wider window has fewer multiplications a power and more a table.

    Args:
        base: The base.
        modulus: The modulus.
        bits: Size of the largest exponent.
        window: Bits of one window.
    """

    def __init__(self, base: int, modulus: int, bits: int, window: int = 8) -> None:
        self.modulus = mpz(modulus)
        self.window = window
        self.table: list[list[Any]] = []
        step = mpz(base) % self.modulus
        for _ in range(-(-bits // window)):
            row = [mpz(1), step]
            for _ in range((1 << window) - 2):
                row.append(row[-1] * step % self.modulus)
            self.table.append(row)
            step = row[-1] * step % self.modulus

    def power(self, exponent: int) -> Any:
        """Return ``base ** exponent mod modulus`` for ``0 <= exponent < 2^bits``."""
        modulus, window = self.modulus, self.window
        mask = (1 << window) - 1
        rest = int(exponent)
        result = mpz(1)
        for row in self.table:
            digit = rest & mask
            rest >>= window
            if digit:
                result = result * row[digit] % modulus
        if rest:
            raise ValueError(f"the exponent has more than {window * len(self.table)} bits")
        return result


def best_window(bits: int, modulus_bits: int, count: int) -> int:
    """Return the window with the fewest multiplications for a table and ``count`` powers.

    Args:
        bits: Size of the largest exponent.
        modulus_bits: Size of the modulus, which with `TABLE_BYTES` bounds the window.
        count: Powers that will be taken.
    """

    def entries(window: int) -> int:
        return -(-bits // window) << window

    def multiplications(window: int) -> int:
        return entries(window) + -(-bits // window) * count

    fitting = [
        w for w in range(2, _MOST_WINDOW + 1) if entries(w) * modulus_bits <= 8 * TABLE_BYTES
    ]
    return min(fitting or [1], key=multiplications)


class Schedule:
    """The order of multiplications of a simultaneous power with small public exponents.

    Factors of one weight are multiplied first. The distinct weights are cut into windows of
    ``width`` bits; in each, factors with the same digit share a bucket, and a running product over
    the buckets from the largest digit down gives the sum of digit times factor (Pippenger's bucket
    method; width 1 is Straus's interleaving). The width with the fewest multiplications is taken.

    Args:
        weights: Exponents, not negative.

    Attributes:
        groups: Indices of the factors of each distinct weight.
        windows: For each window the number of squarings before it, and its buckets of groups.
        multiplications: What one product costs at most.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        distinct = sorted(set(weights) - {0})
        self.groups = [[i for i, w in enumerate(weights) if w == value] for value in distinct]
        bits = max([1, *(w.bit_length() for w in distinct)])
        plans = [self._plan(distinct, bits, width) for width in range(1, min(bits, 8) + 1)]
        count, self.windows = min(plans, key=lambda plan: plan[0])
        self.multiplications = count + sum(len(group) - 1 for group in self.groups)

    @staticmethod
    def _plan(
        weights: Sequence[int], bits: int, width: int
    ) -> tuple[int, list[tuple[int, list[list[int]]]]]:
        windows = []
        count = 0
        for shift in reversed(range(0, bits, width)):
            digits = [(w >> shift) & ((1 << width) - 1) for w in weights]
            buckets = [
                [i for i, digit in enumerate(digits) if digit == value]
                for value in range(max(digits, default=0), 0, -1)
            ]
            count += width + sum(len(bucket) for bucket in buckets) + len(buckets)
            windows.append((width, buckets))
        return count, windows


def random_product(bases: Sequence[Any], exponents: bytes, modulus: Any) -> Any:
    """Return the product of ``bases[i] ** exponents[i]``, as a batch of equations is checked.

    Pippenger's bucket method over the bytes of the exponents, or over half bytes for few bases.

    Args:
        bases: Numbers.
        exponents: 16 bytes each, one after the other, big-endian.
        modulus: The modulus.
    """
    width = 8 if len(bases) > 450 else 4  # where the numbers of multiplications cross
    result = mpz(1)
    for position in range(128 // width):
        for _ in range(width if position else 0):
            result = result * result % modulus
        buckets: list[Any] = [None] * (1 << width)
        for index, base in enumerate(bases):
            digit = exponents[16 * index + position * width // 8]
            if width == 4:
                digit = digit & 15 if position % 2 else digit >> 4
            if digit:
                held = buckets[digit]
                buckets[digit] = base if held is None else held * base % modulus
        running = None
        for held in reversed(buckets[1:]):
            if held is not None:
                running = held if running is None else running * held % modulus
            if running is not None:
                result = result * running % modulus
    return result


def series_logarithm(u: Any, base: Any, degree: int) -> Any:
    """Return ``log(u) / base mod base^degree`` for ``u = 1 mod base``.

    The logarithm is the series ``(u-1) - (u-1)^2/2 + ...``, whose ``k``-th term is a multiple of
    ``base^k``, so that ``degree`` terms are exact. It turns ``(1+n)^m`` into ``m log(1+n)``.
    """
    modulus = base**degree
    t = (u - 1) // base
    result = t % modulus
    power = t
    for k in range(2, degree + 1):
        power = power * t * base % modulus
        result += (-1) ** (k + 1) * power * gmpy2.invert(k, modulus)
    return result % modulus
