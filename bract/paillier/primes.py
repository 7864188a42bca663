"""Random primes whose predecessor has a known factorisation."""

import secrets
from functools import lru_cache

import gmpy2
import numpy as np
from numpy.typing import NDArray

_SIEVE_LIMIT = 1 << 18
_WINDOW = 1 << 17
_ROUNDS = 40  # Miller-Rabin rounds: error below 4^-40 for each accepted number


def random_prime(bits: int) -> int:
    """Return a uniformly chosen prime of exactly ``bits`` bits, randomness from ``secrets``."""
    while True:
        candidate = secrets.randbits(bits) | (1 << (bits - 1)) | 1
        if gmpy2.is_prime(candidate, _ROUNDS):
            return candidate


def safe_prime(bits: int) -> int:
    """Return ``p = 2 p' + 1`` of exactly ``bits`` bits, its two top bits set, ``p'`` prime."""
    return 2 * linked_prime(bits, 2) + 1


def linked_prime(bits: int, multiplier: int) -> int:
    """Return a prime ``b`` for which ``multiplier * b + 1`` is a prime of exactly ``bits`` bits.

    Both numbers are sieved together by all primes below 2^18 over a window of odd candidates
    after a random start, which leaves about one Fermat test in 700 to succeed for 1024 bits;
    testing random candidates one by one takes some hundred times as long. A window that holds
    no such prime is dropped and a new start is drawn.

    Args:
        bits: Size of ``multiplier * b + 1``, whose two top bits are set so that the product of
            two such primes has exactly ``2 * bits`` bits.
        multiplier: Even factor, for example 2 for safe primes.
    """
    low = (3 << (bits - 2)) // multiplier + 1
    high = (1 << bits) // multiplier
    window = min(_WINDOW, max(1, (high - low) // 4))
    if high - low < 2 * window or multiplier % 2:
        raise ValueError(
            f"no room for a prime of {bits} bits above the factor {multiplier}: "
            "take more bits or a smaller even factor"
        )
    while True:
        start = low + secrets.randbelow(high - low - 2 * window) | 1
        for index in np.flatnonzero(_survivors(start, multiplier, window)):
            candidate = start + 2 * int(index)
            if _passes(candidate) and _passes(multiplier * candidate + 1):
                linked = multiplier * candidate + 1
                if gmpy2.is_prime(candidate, _ROUNDS) and gmpy2.is_prime(linked, _ROUNDS):
                    return candidate


def primitive_root(prime: int, factors: tuple[int, ...]) -> int:
    """Return the smallest generator of the multiplicative group modulo ``prime``.

    Args:
        prime: The modulus.
        factors: Every prime factor of ``prime - 1``.
    """
    candidate = 2
    while any(gmpy2.powmod(candidate, (prime - 1) // f, prime) == 1 for f in factors):
        candidate += 1
    return candidate


def _survivors(start: int, multiplier: int, window: int) -> NDArray[np.bool_]:
    """Mark ``k`` where neither ``start + 2k`` nor ``multiplier (start + 2k) + 1`` has a divisor."""
    alive = np.ones(window, dtype=np.bool_)
    base = gmpy2.mpz(start)
    for r in _small_primes():
        if r * r > start:
            break
        residue = int(base % r)
        half = (r + 1) // 2
        alive[-residue * half % r :: r] = False
        factor = multiplier % r
        if factor:
            root = -pow(factor, -1, r)
            alive[(root - residue) * half % r :: r] = False
    return alive


def _passes(candidate: int) -> bool:
    return bool(gmpy2.powmod(2, candidate - 1, candidate) == 1)


@lru_cache(maxsize=1)
def _small_primes() -> tuple[int, ...]:
    prime = np.ones(_SIEVE_LIMIT, dtype=np.bool_)
    prime[:2] = False
    for k in range(2, int(_SIEVE_LIMIT**0.5) + 1):
        if prime[k]:
            prime[k * k :: k] = False
    return tuple(int(r) for r in np.flatnonzero(prime) if r > 2)
