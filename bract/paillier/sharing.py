"""Splitting a private key into shares.

Damgård, Jurik and Nielsen 2010, after Shoup's threshold RSA (Eurocrypt 2000), with a
dealer at key generation; :mod:`bract.paillier.proofs` proves that a partial decryption is correct.
The exponent that decrypts is 0 modulo the order ``alpha`` of the squared randomness and 1 modulo
``n^s``. Written as ``1 + n^s e``, it needs only ``e = -n^(-s) mod alpha`` to be secret, and the
long power ``b = c^(n^s)``, which no longer depends on the message, may be taken by any party, once
(:func:`bract.paillier.stripping.strip_messages`, a task for the server or, at
less cost, for who encrypts). A share must never be
applied to a number that is no such power: ``(1+n)^(2 D f(i)) = 1 + 2 D f(i) n`` is the share
itself.

Share ``i`` is ``f(i)`` for a random polynomial ``f`` of degree ``t-1`` modulo ``alpha`` with
``f(0) = e``. A partial decryption is ``b^(2 D f(i))`` with ``D = l!``; Lagrange interpolation in
the exponent gives ``b^(4 D^2 e)``, and ``c^(4 D^2) b^(4 D^2 e) = (1+n)^(4 D^2 M)``.

``alpha`` is a product of two secret primes: of 256 bits each for a ``djn`` key, and ``p'q'`` with
``p = 2p'+1`` and ``q = 2q'+1`` for a ``standard`` key, as in the original. So a client's work is a
power of 512 bits instead of twice the size of ``n``.

The dealer also gives every party the verification keys ``v^(D f(i)) mod n`` for ``v = g^(2 n^s)``,
where ``g`` is ``h``, or a number that ``n`` decides if the key has none. They reveal nothing more:
``v^e = g^-2`` is public, so a holder of ``t - 1`` shares can compute them all.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gmpy2

from bract.paillier.errors import PaillierError, ThresholdError
from bract.paillier.keys import PrivateKey, PublicKey, Randomness, generate_keypair
from bract.paillier.packing import MOST_DEGREE

MOST_SHARES = 1000


@dataclass(frozen=True)
class KeyShare:
    """One party's part of the private key.

    Attributes:
        public: The public key.
        index: Number of the share, from 1.
        threshold: ``t``, shares needed.
        total: ``l``, shares dealt.
        degree: The only degree ``s`` of ciphertexts that these shares decrypt.
        value: The secret ``f(index)``.
        verification: For each share ``i`` its ``v^(total! f(i)) mod n``, the same for every share.
    """

    public: PublicKey
    index: int
    threshold: int
    total: int
    degree: int
    value: int = field(repr=False)
    verification: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        check_threshold(self.threshold, self.total)
        if not 1 <= self.index <= self.total:
            raise ThresholdError(f"share {self.index} of {self.total} does not exist")
        if not 1 <= self.degree <= MOST_DEGREE or not 0 <= self.value < self.public.n:
            raise ThresholdError(f"the degree or value of share {self.index} is out of range")
        n = self.public.n
        if len(self.verification) != self.total or not all(
            0 < number < n and math.gcd(number, n) == 1 for number in self.verification
        ):
            raise ThresholdError(f"share {self.index} lacks a verification key of each share")
        if _verification_key(self) != self.verification[self.index - 1]:
            raise ThresholdError(
                f"the value of share {self.index} does not fit its verification key: the share is "
                "damaged, or was not dealt for this key"
            )


def deal(
    threshold: int,
    total: int,
    bits: int = 2048,
    *,
    degree: int = 1,
    randomness: Randomness = "djn",
    insecure: bool = False,
) -> list[KeyShare]:
    """Generate a key and deal its shares; no party keeps the whole.

    Args:
        threshold: ``t``, at least 2; with 1 a plain shared key does the same.
        total: ``l``, number of parties.
        bits: Size of ``n``: 2048 or 3072.
        degree: Degree ``s`` of the ciphertexts.
        randomness: As for :func:`bract.paillier.keys.generate_keypair`. Without the factors,
            ``standard`` encryption is some thirty times slower, and partial decryption four times.
        insecure: Allow other sizes, from 64 bits; for tests only.

    Returns:
        ``total`` shares.

    Raises:
        ThresholdError: Not ``2 <= threshold <= total``.
        PaillierError: A size or degree that is not offered.
    """
    check_threshold(threshold, total)
    key = generate_keypair(bits, randomness=randomness, insecure=insecure)
    return split(key, threshold, total, degree=degree)


def split(key: PrivateKey, threshold: int, total: int, *, degree: int = 1) -> list[KeyShare]:
    """Deal shares of an existing key from :func:`bract.paillier.keys.generate_keypair`.

    Raises:
        ThresholdError: Not ``2 <= threshold <= total``.
        PaillierError: The key's randomness has an order that is not twice a large prime modulo
            each factor, as with keys made by ``phe``.
    """
    check_threshold(threshold, total)
    halves = key.order_p // 2, key.order_q // 2
    if len(set(halves)) == 1 or not all(gmpy2.is_prime(x) and x > total for x in halves):
        raise PaillierError(
            "this key cannot be split: the orders of its randomness are not twice two different "
            "primes above the number of shares; generate one with bract"
        )
    alpha = halves[0] * halves[1]
    e = -pow(key.public.n, -degree, alpha) % alpha
    coefficients = [e, *(secrets.randbelow(alpha) for _ in range(threshold - 1))]
    values = []
    for index in range(1, total + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * index + coefficient) % alpha
        values.append(value)
    base, delta = verification_base(key.public, degree), math.factorial(total)
    verification = tuple(int(gmpy2.powmod(base, delta * v, key.public.n)) for v in values)
    return [
        KeyShare(key.public, index, threshold, total, degree, value, verification)
        for index, value in enumerate(values, 1)
    ]


def verification_base(public: PublicKey, degree: int) -> Any:
    """Return ``v``, the base modulo ``n`` of the verification keys: a square of the subgroup."""
    n = public.n
    generator = public.h
    if generator is None:
        size = (public.bits + 7) // 8 + 16
        counter = 0
        while generator is None or math.gcd(generator, n) != 1:
            text = f"bract verification base {counter} {n:x}"
            generator = int.from_bytes(hashlib.shake_256(text.encode()).digest(size), "big") % n
            counter += 1
    return gmpy2.powmod(generator, 2 * n**degree, n)


def _verification_key(share: "KeyShare") -> int:
    base = verification_base(share.public, share.degree)
    return int(gmpy2.powmod(base, math.factorial(share.total) * share.value, share.public.n))


def check_threshold(threshold: int, total: int) -> None:
    """Raise :class:`ThresholdError` unless ``2 <= threshold <= total <= 1000``."""
    if not 2 <= threshold <= total <= MOST_SHARES:
        raise ThresholdError(
            f"a threshold of {threshold} among {total} shares is not possible: it must be at "
            f"least 2 and at most the number of shares, which is at most {MOST_SHARES}"
        )


def lagrange(indices: Sequence[int], delta: int) -> list[int]:
    """Return ``delta`` times the coefficients that give ``f(0)`` from ``f(index)``: integers."""
    coefficients = []
    for i in indices:
        above = delta * math.prod(j for j in indices if j != i)
        coefficients.append(above // math.prod(j - i for j in indices if j != i))
    return coefficients
