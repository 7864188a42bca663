"""Paillier keys: generation, identity, and their form in ``phe``.

A ciphertext of degree ``s`` is ``(1+n)^m R mod n^(s+1)`` with the plaintext ``m`` modulo ``n^s``
(Paillier 1999 for ``s = 1``; Damgård, Jurik and Nielsen 2010, "A generalization of Paillier's
public-key system", for more). The two kinds of randomness differ in how ``R`` is drawn:

``standard``
    ``R = r^(n^s)``, ``r`` uniform. Rests on the decisional composite residuosity assumption.
``djn``
    ``R = (h^(n^s))^a`` with a fixed public ``h`` and a short random ``a``. It assumes in addition
    that such powers look like uniform ones. Keys from :func:`generate_keypair` place ``h`` in a
    hidden subgroup of order ``2 a_p a_q``, the ``a``s being secret 256-bit primes that divide
    ``p - 1`` and ``q - 1`` (Ma, Han and Lei, ACSAC 2021, "Optimized Paillier's cryptosystem with
    fast encryption and decryption"), so that decryption needs an exponent of 257 bits only. The
    best attack known on such subgroups costs the square root of one ``a`` (Coron et al., PKC
    2011), here 2^128.
"""

import hashlib
import math
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import gmpy2
from phe import paillier as phe_paillier

from bract.paillier.errors import PaillierError
from bract.paillier.parallel import release_gil
from bract.paillier.primes import linked_prime, random_prime, safe_prime

Randomness = Literal["djn", "standard"]

SECURE_BITS = (2048, 3072)
_SUBGROUP_BITS = 256
_EXPONENT_MARGIN = 64


@dataclass(frozen=True)
class PublicKey:
    """The public key: encrypts and adds.

    Attributes:
        n: The modulus, product of two primes.
        h: Base of the ``djn`` randomness, modulo ``n``; None where only ``standard`` is possible.
        exponent_bits: Size of the random exponents of ``h``; 0 without ``h``.
    """

    n: int
    h: int | None = None
    exponent_bits: int = 0

    def __post_init__(self) -> None:
        if self.n < 6 or self.n % 2 == 0:
            raise PaillierError("a Paillier modulus is odd, composite and above 5")
        if self.h is None:
            if self.exponent_bits:
                raise PaillierError("a key without h has no exponent size")
            return
        # 1 and n - 1 generate nothing: every ciphertext would be readable.
        if not 1 < self.h < self.n - 1 or math.gcd(self.h, self.n) != 1:
            raise PaillierError("h must lie above 1, below n - 1, and share no factor with n")
        least = 2 * min(_SUBGROUP_BITS, self.bits // 8)
        most = self.bits + _EXPONENT_MARGIN
        if not least <= self.exponent_bits <= most:
            raise PaillierError(
                f"the exponents of h have {least} to {most} bits in a key of {self.bits} bits: "
                "the key's field 'exponent_bits' is outside, so its randomness could be guessed "
                "or its tables would fill the memory"
            )

    @property
    def bits(self) -> int:
        """Size of ``n`` in bits."""
        return self.n.bit_length()

    @cached_property
    def key_id(self) -> str:
        """First 32 hexadecimal digits of the SHA-256 of all fields; travels with ciphertexts."""
        fields = f"bract paillier key 2\n{self.n:x}\n{self.h or 0:x}\n{self.exponent_bits}"
        return hashlib.sha256(fields.encode()).hexdigest()[:32]

    @property
    def randomness(self) -> Randomness:
        """The kind of randomness used where the caller names none."""
        return "standard" if self.h is None else "djn"

    def to_phe(self) -> Any:
        """Return the ``phe.paillier.PaillierPublicKey`` with this ``n``."""
        return phe_paillier.PaillierPublicKey(self.n)


@dataclass(frozen=True)
class PrivateKey:
    """The private key: the factors of ``n``, and the orders of ``h`` modulo each.

    Attributes:
        public: The public key.
        p: First prime factor.
        q: Second prime factor.
        order_p: Order of the subgroup modulo ``p`` that holds ``h``; a divisor of ``p - 1``, and
            ``p - 1`` itself where the randomness is not confined.
        order_q: The same modulo ``q``.
    """

    public: PublicKey
    p: int = field(repr=False)
    q: int = field(repr=False)
    order_p: int = field(repr=False)
    order_q: int = field(repr=False)

    def __post_init__(self) -> None:
        p, q = self.p, self.q
        if p * q != self.public.n or p == q:
            raise PaillierError("the factors do not belong to the public key")
        if not (gmpy2.is_prime(p) and gmpy2.is_prime(q)):
            raise PaillierError("a private key needs two prime factors, found a composite one")
        if math.gcd(self.public.n, (p - 1) * (q - 1)) != 1:
            raise PaillierError("n and (p-1)(q-1) share a factor: decryption would be ambiguous")
        if self.order_p < 1 or self.order_q < 1 or (p - 1) % self.order_p or (q - 1) % self.order_q:
            raise PaillierError("the subgroup orders do not divide p-1 and q-1")
        h = self.public.h
        if h is not None and not (pow(h, self.order_p, p) == 1 == pow(h, self.order_q, q)):
            raise PaillierError("h does not have the stated orders modulo p and q")

    @classmethod
    def from_primes(cls, p: int, q: int, *, insecure: bool = False) -> "PrivateKey":
        """Build a key with ``standard`` randomness from two given primes.

        Raises:
            PaillierError: Not primes, or a product of other than 2048 or 3072 bits; ``insecure``
                lifts the second condition and is for tests.
        """
        check_size((p * q).bit_length(), insecure=insecure)
        return cls(PublicKey(p * q), p, q, p - 1, q - 1)

    def to_phe(self) -> Any:
        """Return the ``phe.paillier.PaillierPrivateKey`` of the same factors."""
        return phe_paillier.PaillierPrivateKey(self.public.to_phe(), self.p, self.q)


def generate_keypair(
    bits: int = 2048, *, randomness: Randomness = "djn", insecure: bool = False
) -> PrivateKey:
    """Generate a key pair with randomness from ``secrets``.

    Args:
        bits: Size of ``n``: 2048 (about 112 bits of security) or 3072 (about 128).
        randomness: ``djn`` builds the hidden subgroup of the module's docstring; ``standard``
            takes two safe primes and no ``h``.
        insecure: Allow other sizes, from 64 bits; for tests only.

    Raises:
        PaillierError: A size that is not offered.
    """
    check_size(bits, insecure=insecure)
    with ThreadPoolExecutor(2, initializer=release_gil) as pool:
        while True:
            if randomness == "standard":
                p, q = pool.map(safe_prime, (bits // 2, bits // 2))
                if p != q:
                    return PrivateKey.from_primes(p, q, insecure=insecure)
                continue
            small = min(_SUBGROUP_BITS, bits // 8)
            a_p, a_q = random_prime(small), random_prime(small)
            b_p, b_q = pool.map(linked_prime, (bits // 2, bits // 2), (2 * a_p, 2 * a_q))
            if len({a_p, a_q, b_p, b_q}) == 4:
                return _confined_key(a_p, b_p, a_q, b_q)


def check_size(bits: int, *, insecure: bool) -> None:
    """Raise :class:`PaillierError` for a key size that is not offered."""
    if insecure:
        return
    if bits not in SECURE_BITS:
        offered = " or ".join(str(size) for size in SECURE_BITS)
        raise PaillierError(f"a key of {bits} bits is not offered: take {offered}")


def _confined_key(a_p: int, b_p: int, a_q: int, b_q: int) -> PrivateKey:
    p, q = 2 * a_p * b_p + 1, 2 * a_q * b_q + 1
    n = p * q
    while True:
        h = n - pow(_random_unit(n), 2 * b_p * b_q, n)
        if h % p != p - 1 and h % q != q - 1:
            break
    exponent_bits = (a_p * a_q).bit_length() + _EXPONENT_MARGIN
    return PrivateKey(PublicKey(n, h, exponent_bits), p, q, 2 * a_p, 2 * a_q)


def _random_unit(n: int) -> int:
    while True:
        x = 2 + secrets.randbelow(n - 2)
        if math.gcd(x, n) == 1:
            return x
