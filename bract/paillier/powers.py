"""Powers and logarithms that know something: a fixed base, small exponents, ``u = 1 mod n``."""

from collections.abc import Sequence
from functools import lru_cache
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


class LiftedBase:
    """Powers modulo ``p^(s+1)`` of an element whose order divides ``p - 1``, by short factors.

    Such an element follows from its residue ``x`` modulo ``p``: it is ``w(x)``, the Teichmüller
    lift. As ``w`` is multiplicative and ``w(x) / x`` is 1 modulo ``p``, a product of lifts is
    ``prod(x_i) exp(sum(log(w(x_i) / x_i)))``. So a step multiplies by a factor of the size of
    ``p`` in place of one of ``p^(s+1)``, which is faster, and adds a logarithm.

    Args:
        base: The element.
        prime: ``p``, above ``s + 1``.
        degree: ``s``.
        bits: Size of the largest exponent.
        window: Bits of one window, as for :class:`FixedBase`.

    Raises:
        ValueError: The order of ``base`` modulo ``p^(s+1)`` does not divide ``p - 1``.
    """

    def __init__(self, base: int, prime: int, degree: int, bits: int, window: int = 8) -> None:
        self.prime, self.degree = mpz(prime), degree
        self.modulus = self.prime ** (degree + 1)
        self.window = window
        if gmpy2.powmod(base, self.prime - 1, self.modulus) != 1:
            raise ValueError(f"the order of the base modulo p^{degree + 1} does not divide p - 1")
        self.table: list[tuple[list[Any], list[Any]]] = []
        inverse = gmpy2.invert(base, self.modulus)
        for _ in range(-(-bits // window)):
            step = gmpy2.invert(inverse, self.prime)
            factors, logarithms, inverted = [mpz(1)], [mpz(0)], inverse
            for _ in range((1 << window) - 1):
                factor = factors[-1] * step % self.prime
                factors.append(factor)
                inexact = factor * inverted % self.modulus
                logarithms.append(-series_logarithm(inexact, self.prime, degree))
                inverted = inverted * inverse % self.modulus
            self.table.append((factors, logarithms))
            inverse = inverted

    @staticmethod
    def entry_cost(degree: int) -> float:
        """Return what an entry of the table costs, in steps of a power."""
        return 1.5 + 2.5 * degree

    def power(self, exponent: int) -> Any:
        """Return ``base ** exponent mod p^(s+1)`` for ``0 <= exponent < 2^bits``."""
        modulus, window = self.modulus, self.window
        mask = (1 << window) - 1
        rest = int(exponent)
        product, logarithm = mpz(1), mpz(0)
        for factors, logarithms in self.table:
            digit = rest & mask
            rest >>= window
            if digit:
                product = product * factors[digit] % modulus
                logarithm += logarithms[digit]
        if rest:
            raise ValueError(f"the exponent has more than {window * len(self.table)} bits")
        return product * series_exponential(logarithm, self.prime, self.degree) % modulus


def best_window(bits: int, modulus_bits: int, count: int, entry_cost: float = 1.0) -> int:
    """Return the window with the fewest multiplications for a table and ``count`` powers.

    Args:
        bits: Size of the largest exponent.
        modulus_bits: Size of the modulus, which with `TABLE_BYTES` bounds the window.
        count: Powers that will be taken.
        entry_cost: Cost of an entry of the table, in multiplications of a power.
    """

    def entries(window: int) -> int:
        return -(-bits // window) << window

    def multiplications(window: int) -> float:
        return entry_cost * entries(window) + -(-bits // window) * count

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


@lru_cache(maxsize=256)
def inverse(number: Any, modulus: Any) -> Any:
    """Return the inverse of a small number, kept for the next of many series."""
    return gmpy2.invert(number, modulus)


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
        result += (-1) ** (k + 1) * power * inverse(k, modulus)
    return result % modulus


def series_exponential(value: Any, base: Any, degree: int) -> Any:
    """Return ``exp(base value) mod base^(degree+1)``, what :func:`series_logarithm` undoes.

    Args:
        value: A number.
        base: A prime above ``degree``, so that ``degree`` terms after the first are exact.
        degree: Number of these terms.
    """
    modulus = base ** (degree + 1)
    argument = value * base % modulus
    result, term = 1 + argument, argument
    for k in range(2, degree + 1):
        term = term * argument % modulus
        result += term * inverse(gmpy2.fac(k), modulus)
    return result % modulus
