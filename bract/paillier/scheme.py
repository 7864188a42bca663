"""Encryption of whole integers: what one ciphertext is, and how it is computed fast.

Every power of a fixed base goes through a table (:class:`bract.paillier.powers.FixedBase`). Who
holds the factors works modulo ``p^(s+1)`` and ``q^(s+1)``, where all randomness is a lift from
``p`` and short factors do (:class:`bract.paillier.powers.LiftedBase`), and joins the two by the
Chinese remainder theorem. That makes even ``standard`` randomness cheap: ``n^s``-th powers modulo
``p^(s+1)`` are a cyclic group of order ``p - 1``, so a uniform power of its generator is
distributed exactly as ``r^(n^s)`` with ``r`` uniform.

None of this runs in constant time. It is meant for training clients, not for hosts that an
attacker can time.
"""

import secrets
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import gmpy2
from gmpy2 import mpz, powmod

from bract.paillier.errors import CiphertextError, PaillierError, UndecryptableError
from bract.paillier.keys import PrivateKey, PublicKey, Randomness
from bract.paillier.powers import (
    FixedBase,
    LiftedBase,
    Schedule,
    best_window,
    inverse,
    series_logarithm,
)
from bract.paillier.primes import primitive_root

_UNTOLD = 100
"""Powers for which a table is made where nobody said how many will be taken."""


class Scheme:
    """One key and degree: the numbers that every encryption and addition needs.

    Attributes:
        public: The key.
        degree: ``s``; 1 is Paillier's own scheme, and what ``phe`` understands.
        plain_modulus: ``n^s``.
        cipher_modulus: ``n^(s+1)``.
        cipher_bytes: Bytes of one ciphertext.
    """

    def __init__(self, public: PublicKey, degree: int = 1) -> None:
        if degree < 1:
            raise PaillierError(f"the degree must be at least 1, found {degree}")
        self.public = public
        self.degree = degree
        self.n = mpz(public.n)
        self.plain_modulus = self.n**degree
        self.cipher_modulus = self.plain_modulus * self.n
        self.cipher_bytes = ((degree + 1) * public.bits + 7) // 8
        self._short = _ShortPowers(public, degree, self.cipher_modulus, public.exponent_bits)

    def expect(self, count: int, randomness: Randomness) -> None:
        """Build the tables that are best for so many randomizers, before threads share them.

        Raises:
            PaillierError: ``djn`` randomness under a key that has no base for it.
        """
        if randomness == "djn":
            self._short.expect(count)

    def randomizer(self, randomness: Randomness) -> Any:
        """Return one fresh encryption of zero."""
        if randomness == "djn":
            return self.short_power(secrets.randbits(self.public.exponent_bits))
        r = 1 + secrets.randbelow(self.public.n - 1)
        return powmod(r, self.plain_modulus, self.cipher_modulus)

    def encrypt(self, plaintext: int, randomness: Randomness, exponent: int | None = None) -> Any:
        """Encrypt one integer, ``0 <= plaintext < n^s``, with fresh randomness.

        ``exponent`` is that of ``djn`` randomness; None draws one. Never take one twice.
        """
        factor = self.randomizer(randomness) if exponent is None else self.short_power(exponent)
        return self.embed(plaintext) * factor % self.cipher_modulus

    def short_power(self, exponent: int) -> Any:
        """Return the encryption of zero that an exponent of ``djn`` randomness makes."""
        return self._short.power(exponent)

    def embed(self, plaintext: int) -> Any:
        """Return ``(1 + n)^plaintext mod n^(s+1)`` by its binomial series of ``s + 1`` terms."""
        m = mpz(plaintext)
        if not 0 <= m < self.plain_modulus:
            raise PaillierError("a plaintext must lie between 0 and n^s")
        result = mpz(1)
        term = mpz(1)
        for k in range(1, self.degree + 1):
            term = term * (m - k + 1) * self.n % self.cipher_modulus
            result += term * inverse(gmpy2.fac(k), self.cipher_modulus)
        return result % self.cipher_modulus

    def weighted_product(self, ciphertexts: Sequence[Any], schedule: Schedule) -> Any:
        """Return the product of ``ciphertexts[i] ** weights[i]`` modulo ``n^(s+1)``."""
        modulus = self.cipher_modulus
        factors = []
        for group in schedule.groups:
            factor = ciphertexts[group[0]]
            for index in group[1:]:
                factor = factor * ciphertexts[index] % modulus
            factors.append(factor)
        result = None
        for doublings, buckets in schedule.windows:
            if result is not None:
                for _ in range(doublings):
                    result = result * result % modulus
            running = None
            for bucket in buckets:
                for index in bucket:
                    factor = factors[index]
                    running = factor if running is None else running * factor % modulus
                if running is not None:
                    result = running if result is None else result * running % modulus
        return mpz(1) if result is None else result

    def check(self, ciphertexts: Sequence[Any], first: int = 0) -> None:
        """Refuse what no encryption can be.

        Args:
            ciphertexts: Numbers to check.
            first: Number of the first, for the message.

        Raises:
            CiphertextError: A number out of ``0 < c < n^(s+1)``, or not coprime to ``n``.
        """
        product = mpz(1)
        for index, c in enumerate(ciphertexts):
            if not 0 < c < self.cipher_modulus:
                raise CiphertextError(
                    f"ciphertext {first + index} is out of range for key {self.public.key_id}: "
                    "altered, or encrypted under another key"
                )
            product = product * c % self.n
        if gmpy2.gcd(product, self.n) != 1:
            shared = next(k for k, c in enumerate(ciphertexts) if gmpy2.gcd(c, self.n) != 1)
            raise CiphertextError(
                f"ciphertext {first + shared} shares a factor with n: no encryption does, "
                "so it was altered"
            )


class PrivateScheme(Scheme):
    """The same with the factors of ``n``: faster encryption, and decryption."""

    def __init__(self, private: PrivateKey, degree: int = 1) -> None:
        super().__init__(private.public, degree)
        self.private = private
        self.sides = tuple(
            _Side(self, prime, order)
            for prime, order in ((private.p, private.order_p), (private.q, private.order_q))
        )
        p, q = self.sides
        self._lift = p.modulus * gmpy2.invert(p.modulus, q.modulus)
        self._plain_lift = p.plain_modulus * gmpy2.invert(p.plain_modulus, q.plain_modulus)

    def randomizer(self, randomness: Randomness) -> Any:
        """Return one fresh encryption of zero, distributed as :meth:`Scheme.randomizer`'s."""
        if randomness == "djn":
            return self.short_power(secrets.randbits(self.public.exponent_bits))
        p, q = self.sides
        return self._join(p.uniform_power(), q.uniform_power())

    def expect(self, count: int, randomness: Randomness) -> None:
        """Do what :meth:`Scheme.expect` does."""
        for side in self.sides:
            side.expect(count, randomness)

    def short_power(self, exponent: int) -> Any:
        """Return what :meth:`Scheme.short_power` does."""
        p, q = self.sides
        return self._join(p.short_power(mpz(exponent)), q.short_power(mpz(exponent)))

    def _join(self, a: Any, b: Any) -> Any:
        return (a + (b - a) * self._lift) % self.cipher_modulus

    def decrypt_known(
        self, ciphertexts: Sequence[Any], exponents: Sequence[int]
    ) -> list[Any] | None:
        """Decrypt integers whose ``djn`` randomness is known, by taking it away.

        Args:
            ciphertexts: Numbers that passed :meth:`Scheme.check`.
            exponents: Of the randomness of each, of any size.

        Returns:
            The plaintexts, None where one has other randomness.
        """
        p, q = self.sides
        left, right = (s.known_logarithms(ciphertexts, exponents) for s in (p, q))
        if None in left or None in right:
            return None
        return [
            (a + (b - a) * self._plain_lift) % self.plain_modulus
            for a, b in zip(left, right, strict=True)
        ]

    def decrypt(
        self, ciphertexts: Sequence[Any], randomness: Randomness, first: int = 0
    ) -> list[Any]:
        """Decrypt integers.

        Args:
            ciphertexts: Numbers that passed :meth:`Scheme.check`.
            randomness: ``djn`` takes the short exponents, and finds out where they do not fit;
                ``standard`` decrypts every Paillier ciphertext.
            first: Number of the first, for the message.

        Returns:
            A list of plaintexts, ``0 <= m < n^s``.

        Raises:
            UndecryptableError: ``djn`` only: the randomness of a ciphertext is outside the hidden
                subgroup, so it was altered on its way or made with ``standard`` randomness.
        """
        p, q = self.sides
        left, right = p.logarithms(ciphertexts, randomness), q.logarithms(ciphertexts, randomness)
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            if a is None or b is None:
                raise UndecryptableError(
                    f"ciphertext {first + index} was not made with djn randomness under key "
                    f"{self.public.key_id}: it was altered on its way, or its sender used "
                    "standard randomness and did not say so"
                )
        return [
            (a + (b - a) * self._plain_lift) % self.plain_modulus
            for a, b in zip(left, right, strict=True)
        ]


class _ShortPowers:
    """Powers of the base of ``djn`` randomness, ``h^(n^s)``, modulo ``n^(s+1)`` or ``p^(s+1)``.

    Args:
        public: The key.
        degree: ``s``.
        modulus: The modulus.
        bits: Size of the largest exponent.
        prime: ``p``, where the modulus is a power of it.
    """

    def __init__(
        self, public: PublicKey, degree: int, modulus: Any, bits: int, prime: Any = None
    ) -> None:
        self._public, self._degree, self._modulus, self._bits = public, degree, modulus, bits
        self._prime = prime
        self._table: FixedBase | LiftedBase | None = None

    def expect(self, count: int) -> FixedBase | LiftedBase:
        """Return a table for so many powers: the one that is there, if it is nearly as good."""
        cost = 1.0 if self._prime is None else LiftedBase.entry_cost(self._degree)
        window = best_window(self._bits, self._modulus.bit_length(), count, cost)
        if self._table is None or self._table.window < window - 2:
            if self._public.h is None:
                raise PaillierError(
                    f"key {self._public.key_id} has no base h for djn randomness: "
                    "use standard randomness, or generate the key for djn"
                )
            base = powmod(self._public.h, mpz(self._public.n) ** self._degree, self._modulus)
            self._table = (
                FixedBase(base, self._modulus, self._bits, window)
                if self._prime is None
                else LiftedBase(base, self._prime, self._degree, self._bits, window)
            )
        return self._table

    def power(self, exponent: Any) -> Any:
        """Return ``h^(n^s exponent)``."""
        return (self._table or self.expect(_UNTOLD)).power(exponent)


class _Side:
    """Arithmetic modulo ``p^(s+1)`` for one prime factor ``p``."""

    def __init__(self, scheme: Scheme, prime: int, order: int) -> None:
        self.scheme = scheme
        self.prime = mpz(prime)
        self.order = mpz(order)
        self.plain_modulus = self.prime**scheme.degree
        self.modulus = self.plain_modulus * self.prime
        self._short = _ShortPowers(
            scheme.public, scheme.degree, self.modulus, self.order.bit_length(), self.prime
        )
        self._scales = {
            exponent: gmpy2.invert(self._log(1 + scheme.n) * exponent, self.plain_modulus)
            for exponent in (self.order, self.prime - 1)
        }

    def expect(self, count: int, randomness: Randomness) -> None:
        """Build the tables that are best for so many randomizers."""
        if randomness == "djn":
            self._short.expect(count)
        else:
            self.uniform_power()

    @cached_property
    def _uniform_powers(self) -> LiftedBase | None:
        """Powers of a generator, if the factors of ``p - 1`` follow from the order."""
        small = self.order // 2 if self.order != self.prime - 1 else mpz(1)
        large = (self.prime - 1) // 2 // small
        factors = [f for f in {mpz(2), small, large} if f > 1]
        if not all(gmpy2.is_prime(f) for f in factors):
            return None
        generator = primitive_root(self.prime, tuple(factors))
        base = powmod(generator, self.plain_modulus, self.modulus)
        return LiftedBase(base, self.prime, self.scheme.degree, self.prime.bit_length())

    def short_power(self, exponent: Any) -> Any:
        return self._short.power(exponent % self.order)

    def uniform_power(self) -> Any:
        powers = self._uniform_powers
        exponent = secrets.randbelow(int(self.prime) - 1)
        if powers is not None:
            return powers.power(exponent)
        return powmod(1 + exponent, self.plain_modulus, self.modulus)

    def logarithms(self, ciphertexts: Sequence[Any], randomness: Randomness) -> list[Any]:
        """Return the plaintexts modulo ``p^s``, None where the exponent leaves randomness."""
        exponent = self.order if randomness == "djn" else self.prime - 1
        scale = self._scales[exponent]
        reduced = [c % self.modulus for c in ciphertexts]
        return [
            self._log(u) * scale % self.plain_modulus if u % self.prime == 1 else None
            for u in gmpy2.powmod_base_list(reduced, exponent, self.modulus)
        ]

    def known_logarithms(self, ciphertexts: Sequence[Any], exponents: Sequence[int]) -> list[Any]:
        """Return the plaintexts modulo ``p^s``, None where the exponent is another one."""
        scale = gmpy2.invert(self._log(1 + self.scheme.n), self.plain_modulus)
        stripped = [
            c % self.modulus * self.short_power(-mpz(exponent)) % self.modulus
            for c, exponent in zip(ciphertexts, exponents, strict=True)
        ]
        return [
            self._log(u) * scale % self.plain_modulus if u % self.prime == 1 else None
            for u in stripped
        ]

    def _log(self, u: Any) -> Any:
        return series_logarithm(u, self.prime, self.scheme.degree)


@lru_cache(maxsize=8)
def scheme_for(key: PublicKey | PrivateKey, degree: int) -> Scheme:
    """Return the scheme of a key, its tables kept for the next call."""
    if isinstance(key, PrivateKey):
        return PrivateScheme(key, degree)
    return Scheme(key, degree)
