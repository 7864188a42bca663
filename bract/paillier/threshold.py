"""Threshold decryption: any ``t`` of ``l`` key shares decrypt together, fewer learn nothing.

Damgård, Jurik and Nielsen 2010, section 4.1, after Shoup's threshold RSA (Eurocrypt 2000), with a
dealer at key generation and without proofs of correct decryption: parties are honest but curious.
With ``n = pq``, ``p = 2p'+1`` and ``q = 2q'+1`` safe primes and ``m = p'q'``, the secret ``d`` is 0
modulo ``m`` and 1 modulo ``n^s``, share ``i`` is ``f(i)`` for a random polynomial ``f`` of degree
``t-1`` with ``f(0) = d`` modulo ``n^s m``. A partial decryption of ``c`` is ``c^(2 D f(i))`` with
``D = l!``; Lagrange interpolation in the exponent gives ``c^(4 D^2 d) = (1+n)^(4 D^2 M)``.

What it protects: one client and the server together hold one share and read nothing. What it does
not: ``t`` clients together read everything, a share's owner cannot tell an aggregate from a single
client's vector before helping to decrypt it, and whoever collects ``t`` partial decryptions reads
the result, so they must travel sealed (:mod:`bract.paillier.exchange`), never in clear through the
server. The dealer sees the factors and must forget them.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier.cipher import CipherVector, checked_rows, decode, require_key, to_matrix
from bract.paillier.errors import CiphertextError, KeyMismatchError, PaillierError, ThresholdError
from bract.paillier.keys import PublicKey, Randomness, check_size, whole_group_h
from bract.paillier.parallel import Progress, map_chunks, release_gil
from bract.paillier.powers import Schedule, series_logarithm
from bract.paillier.primes import safe_prime
from bract.paillier.scheme import Scheme, scheme_for

_MOST_SHARES = 1000


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
    """

    public: PublicKey
    index: int
    threshold: int
    total: int
    degree: int
    value: int = field(repr=False)

    def __post_init__(self) -> None:
        check_threshold(self.threshold, self.total)
        if not 1 <= self.index <= self.total:
            raise ThresholdError(f"share {self.index} of {self.total} does not exist")
        if self.degree < 1 or not 0 <= self.value < self.public.n ** (self.degree + 1):
            raise ThresholdError(f"the value of share {self.index} is out of range")


@dataclass(frozen=True, eq=False)
class PartialDecryption:
    """What one share makes of one vector.

    Attributes:
        key_id: Identity of the key.
        index: Number of the share.
        digest: SHA-256 of the vector, so that answers to different vectors are never combined.
        data: ``uint8``, the shape of the vector's data.
    """

    key_id: str
    index: int
    threshold: int
    total: int
    digest: str
    data: NDArray[np.uint8]

    def header(self) -> dict[str, Any]:
        """Return everything but ``data``, ready for JSON."""
        names = ("key_id", "index", "threshold", "total", "digest")
        return {name: getattr(self, name) for name in names}


def deal(
    threshold: int,
    total: int,
    bits: int = 2048,
    *,
    degree: int = 1,
    randomness: Randomness = "djn",
    insecure: bool = False,
) -> list[KeyShare]:
    """Generate a key and deal its shares; nobody keeps the whole.

    Args:
        threshold: ``t``, at least 2; with 1 a plain shared key does the same.
        total: ``l``, number of parties.
        bits: Size of ``n``: 2048 or 3072; two safe primes take seconds.
        degree: Degree ``s`` of the ciphertexts.
        randomness: ``djn`` adds ``h = -x^2``; ``standard`` leaves it out, and encryption without
            the factors is then some thirty times slower.
        insecure: Allow other sizes, from 64 bits; for tests only.

    Returns:
        ``total`` shares.

    Raises:
        ThresholdError: Not ``2 <= threshold <= total``.
        PaillierError: A size or degree that is not offered.
    """
    check_threshold(threshold, total)
    check_size(bits, insecure=insecure)
    p = q = 0
    with ThreadPoolExecutor(2, initializer=release_gil) as pool:
        while p == q:
            p, q = pool.map(safe_prime, (bits // 2, bits // 2))
    return share_primes(p, q, threshold, total, degree=degree, randomness=randomness)


def share_primes(
    p: int, q: int, threshold: int, total: int, *, degree: int = 1, randomness: Randomness = "djn"
) -> list[KeyShare]:
    """Deal shares of the key with given safe primes, both larger than ``2 total + 1``."""
    check_threshold(threshold, total)
    if not all(gmpy2.is_prime(x) and gmpy2.is_prime(x // 2) and x // 2 > total for x in (p, q)):
        raise PaillierError("threshold keys need two safe primes, larger than twice the shares")
    n = p * q
    public = PublicKey(n, *whole_group_h(n)) if randomness == "djn" else PublicKey(n)
    plain_modulus, m = n**degree, (p // 2) * (q // 2)
    modulus = plain_modulus * m
    d = m * pow(m, -1, plain_modulus)
    coefficients = [d, *(secrets.randbelow(modulus) for _ in range(threshold - 1))]
    shares = []
    for index in range(1, total + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * index + coefficient) % modulus
        shares.append(KeyShare(public, index, threshold, total, degree, value))
    return shares


def partial_decrypt(
    share: KeyShare,
    vector: CipherVector,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PartialDecryption:
    """Apply one share to a vector.

    Args:
        share: The share.
        vector: A vector under its key and of its degree.
        threads: None takes all cores.
        progress: Told (ciphertexts done, ciphertexts in total).

    Raises:
        KeyMismatchError: The vector belongs to another key.
        CiphertextError: Another degree, or a number that is no ciphertext.
    """
    require_key(share.public, vector)
    _require_degree(share.degree, vector)
    scheme = scheme_for(share.public, share.degree)
    exponent = 2 * math.factorial(share.total) * share.value

    def open_rows(rows: Sequence[int]) -> list[Any]:
        numbers = checked_rows(scheme, vector, rows)
        return list(gmpy2.powmod_base_list(numbers, exponent, scheme.cipher_modulus))

    powers = map_chunks(open_rows, range(vector.layout.rows), threads=threads, progress=progress)
    return PartialDecryption(
        vector.key_id,
        share.index,
        share.threshold,
        share.total,
        _digest(vector),
        to_matrix(powers, scheme.cipher_bytes),
    )


def combine(
    public: PublicKey,
    vector: CipherVector,
    partials: Sequence[PartialDecryption],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """Decrypt a vector from at least ``t`` partial decryptions of it.

    Args:
        public: The public key.
        vector: The vector that was partially decrypted.
        partials: Of different shares; more than ``t`` are not needed.
        threads: None takes all cores.
        progress: Told (ciphertexts done, ciphertexts in total).

    Returns:
        ``float64`` of shape ``(layout.length,)``, as :func:`bract.paillier.cipher.decrypt` gives.

    Raises:
        ThresholdError: Fewer than ``t``, one twice, made from another vector, or not matching.
        KeyMismatchError: Vector or partial decryption of another key.
    """
    require_key(public, vector)
    chosen = _choose(vector, partials)
    scheme = scheme_for(public, vector.layout.degree)
    delta = math.factorial(chosen[0].total)
    exponents = [2 * e for e in _lagrange([part.index for part in chosen], delta)]
    above = Schedule([max(e, 0) for e in exponents])
    below = Schedule([max(-e, 0) for e in exponents])
    scale = _scale(scheme, delta)

    def join(rows: Sequence[int]) -> list[Any]:
        columns = [checked_rows(scheme, part, rows) for part in chosen]
        plaintexts = []
        for row, powers in zip(rows, zip(*columns, strict=True), strict=True):
            divisor = gmpy2.invert(scheme.weighted_product(powers, below), scheme.cipher_modulus)
            u = scheme.weighted_product(powers, above) * divisor % scheme.cipher_modulus
            if u % scheme.n != 1:
                raise ThresholdError(
                    f"the partial decryptions of ciphertext {row} by shares "
                    f"{[part.index for part in chosen]} do not fit together: one was altered, or "
                    "its share belongs to another dealing"
                )
            logarithm = series_logarithm(u, scheme.n, scheme.degree)
            plaintexts.append(logarithm * scale % scheme.plain_modulus)
        return plaintexts

    plaintexts = map_chunks(join, range(vector.layout.rows), threads=threads, progress=progress)
    return decode(vector, plaintexts)


def check_threshold(threshold: int, total: int) -> None:
    """Raise :class:`ThresholdError` unless ``2 <= threshold <= total <= 1000``."""
    if not 2 <= threshold <= total <= _MOST_SHARES:
        raise ThresholdError(
            f"a threshold of {threshold} among {total} shares is not possible: it must be at "
            f"least 2 and at most the number of shares, which is at most {_MOST_SHARES}"
        )


def _choose(vector: CipherVector, partials: Sequence[PartialDecryption]) -> list[PartialDecryption]:
    if not partials:
        raise ThresholdError("no partial decryptions: at least two clients have to answer")
    need, total = partials[0].threshold, partials[0].total
    digest = _digest(vector)
    for part in partials:
        if part.key_id != vector.key_id:
            raise KeyMismatchError(
                f"share {part.index} belongs to key {part.key_id}, the vector to {vector.key_id}"
            )
        if part.digest != digest or part.data.shape != vector.data.shape:
            raise ThresholdError(f"share {part.index} decrypted another vector than this one")
        if (part.threshold, part.total) != (need, total):
            raise ThresholdError(f"share {part.index} belongs to another dealing")
    indices = sorted(part.index for part in partials)
    if len(set(indices)) < len(indices):
        raise ThresholdError(f"shares answered more than once: {indices}")
    if len(indices) < need:
        raise ThresholdError(
            f"{len(indices)} of {total} clients answered (shares {indices}), {need} are needed to "
            "decrypt: wait for more clients, or restart those that are missing"
        )
    return sorted(partials, key=lambda part: part.index)[:need]


def _lagrange(indices: Sequence[int], delta: int) -> list[int]:
    """Return ``delta`` times the coefficients that give ``f(0)`` from ``f(index)``: integers."""
    coefficients = []
    for i in indices:
        above = delta * math.prod(j for j in indices if j != i)
        coefficients.append(above // math.prod(j - i for j in indices if j != i))
    return coefficients


def _scale(scheme: Scheme, delta: int) -> Any:
    unit = series_logarithm(1 + scheme.n, scheme.n, scheme.degree)
    return gmpy2.invert(4 * delta**2 * unit, scheme.plain_modulus)


def _require_degree(degree: int, vector: CipherVector) -> None:
    if vector.layout.degree != degree:
        raise CiphertextError(
            f"the vector has degree {vector.layout.degree}, the key shares were dealt for "
            f"{degree}: plan the layout with degree={degree}"
        )


def _digest(vector: CipherVector) -> str:
    header = json.dumps(vector.header(), sort_keys=True).encode()
    return hashlib.sha256(header + vector.data.tobytes()).hexdigest()
