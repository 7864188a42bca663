"""Proofs about whole vectors of powers: stripping was done right, and so was a partial decryption.

Both fold a vector into one number with a random exponent of 128 bits for each ciphertext: if one
ciphertext is wrong by a factor of large order, the products differ but for a chance of 2^-128
(Bellare, Garay and Rabin, Eurocrypt 1998, the small exponents test). A factor of -1 passes; it is
squared away in every use. Other factors of small order come only from the factors of ``n``.

A partial decryption is ``P = b^(2x)`` with ``x = l! f(i)``, and the verification key of the share
is ``v_i = v^x mod n``. That ``x`` is the same in both is the equality of two discrete logarithms
(Chaum and Pedersen, Crypto 1992), made non-interactive by a hash (Fiat and Shamir, Crypto 1986), in
groups of unknown order as in Shoup, Eurocrypt 2000: with ``B`` and ``P`` folded and squared, the
prover sends ``e = H(v^r, B^r)`` and ``z = r + e x``, the verifier recomputes ``v^z v_i^-e`` and
``B^z P^-e``. ``r`` is 256 bits longer than ``x``, which hides ``x`` up to 2^-128.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier.parallel import available_cores, map_chunks
from bract.paillier.powers import random_product
from bract.paillier.scheme import Scheme
from bract.paillier.sharing import KeyShare, verification_base

_BYTES = 16
"""Bytes of a challenge and of a folding exponent."""


@dataclass(frozen=True)
class Proof:
    """That one share made a vector of powers.

    Attributes:
        challenge: ``e``, below 2^128.
        response: ``z``.
    """

    challenge: int
    response: int


@dataclass(frozen=True, eq=False)
class Statement:
    """The statement of a proof.

    Attributes:
        share: The prover's or the verifier's share; its verification keys are common to all.
        index: Number of the share that made the powers.
        digest: Names the vector that was decrypted.
        powers: ``P``, ``uint8`` of shape ``(rows, cipher_bytes)``.
    """

    share: KeyShare
    index: int
    digest: str
    powers: NDArray[np.uint8]

    def seed(self) -> bytes:
        """Return a hash of all that is public, from which the challenges are drawn."""
        share = self.share
        text = (
            f"bract partial decryption 1\n{share.public.key_id}\n{share.degree}\n"
            f"{share.threshold}\n{share.total}\n{self.index}\n{self.digest}\n"
            f"{','.join(map(hex, share.verification))}\n"
        )
        return hashlib.sha256(text.encode() + self.powers.tobytes()).digest()


def same_powers(
    scheme: Scheme, bases: Sequence[Any], powers: Sequence[Any], *, threads: int | None = None
) -> bool:
    """Return whether ``powers[i] = ± bases[i]^(n^s)`` for all ``i``, wrong with chance 2^-128."""
    exponents = secrets.token_bytes(_BYTES * len(bases))
    modulus = scheme.cipher_modulus
    expected = gmpy2.powmod(
        fold(bases, exponents, modulus, threads=threads), 2 * scheme.plain_modulus, modulus
    )
    found = fold(powers, exponents, modulus, threads=threads)
    return bool(expected == found * found % modulus)


def prove(
    scheme: Scheme,
    statement: Statement,
    stripped: Sequence[Any],
    powers: Sequence[Any],
    *,
    threads: int | None = None,
) -> Proof:
    """Prove that ``powers[i] = ± stripped[i]^(2x)`` for the ``x`` of the share's verification key.

    Args:
        scheme: Key and degree.
        statement: With the prover's own share and index.
        stripped: ``b``, known to be right.
        powers: ``P``, the same numbers as in the statement.
        threads: None takes all cores.
    """
    share, modulus = statement.share, scheme.cipher_modulus
    seed = statement.seed()
    base = gmpy2.powmod(
        fold(stripped, _exponents(seed, len(powers)), modulus, threads=threads), 4, modulus
    )
    blind = secrets.randbits(_secret_bits(share) + 16 * _BYTES)
    commitments = (
        gmpy2.powmod(verification_base(share.public, share.degree), blind, scheme.n),
        gmpy2.powmod(base, blind, modulus),
    )
    challenge = _challenge(seed, *commitments)
    return Proof(challenge, blind + challenge * math.factorial(share.total) * share.value)


def verify(
    scheme: Scheme,
    statement: Statement,
    ciphertexts: Sequence[Any],
    powers: Sequence[Any],
    proof: Proof,
    *,
    threads: int | None = None,
) -> bool:
    """Return whether share ``statement.index`` made ``powers`` of ``ciphertexts``.

    The verifier needs no stripped vector: it folds the ciphertexts and strips one number.

    Args:
        scheme: Key and degree.
        statement: With the verifier's own share.
        ciphertexts: The vector's numbers, checked.
        powers: ``P``, checked to be coprime to ``n``.
        proof: What the share's owner sent.
        threads: None takes all cores.
    """
    share, modulus = statement.share, scheme.cipher_modulus
    most = _secret_bits(share) + 16 * _BYTES + 1
    if not (0 <= proof.challenge < 1 << 8 * _BYTES and 0 <= proof.response < 1 << most):
        return False
    seed = statement.seed()
    exponents = _exponents(seed, len(powers))
    base = gmpy2.powmod(
        fold(ciphertexts, exponents, modulus, threads=threads), 4 * scheme.plain_modulus, modulus
    )
    power = gmpy2.powmod(fold(powers, exponents, modulus, threads=threads), 2, modulus)
    first = gmpy2.powmod(
        verification_base(share.public, share.degree), proof.response, scheme.n
    ) * gmpy2.powmod(share.verification[statement.index - 1], -proof.challenge, scheme.n)
    second = gmpy2.powmod(base, proof.response, modulus) * gmpy2.powmod(
        power, -proof.challenge, modulus
    )
    return _challenge(seed, first % scheme.n, second % modulus) == proof.challenge


def fold(
    numbers: Sequence[Any], exponents: bytes, modulus: Any, *, threads: int | None = None
) -> Any:
    """Return the product of ``numbers[i]`` to the ``i``-th 128-bit exponent, modulo ``modulus``."""
    count = max(1, min(threads or available_cores(), len(numbers) // 64))
    size = -(-len(numbers) // count)
    starts = range(0, len(numbers), size)

    def part(firsts: Sequence[int]) -> list[Any]:
        return [
            random_product(
                numbers[k : k + size], exponents[_BYTES * k : _BYTES * (k + size)], modulus
            )
            for k in firsts
        ]

    result = gmpy2.mpz(1)
    for product in map_chunks(part, starts, threads=threads):
        result = result * product % modulus
    return result


def _exponents(seed: bytes, count: int) -> bytes:
    return hashlib.shake_256(b"fold" + seed).digest(_BYTES * count)


def _challenge(seed: bytes, *commitments: Any) -> int:
    text = "\n".join(f"{int(number):x}" for number in commitments)
    digest = hashlib.sha256(b"challenge" + seed + text.encode()).digest()
    return int.from_bytes(digest[:_BYTES], "big")


def _secret_bits(share: KeyShare) -> int:
    """Return a public bound on the size of ``x``: the randomness' order is below its exponents."""
    order = share.public.exponent_bits or share.public.bits
    return order + math.factorial(share.total).bit_length()
