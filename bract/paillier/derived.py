"""Randomness that holders of the private key derive alike, so that decryption takes it away.

An encryption by a key holder draws a nonce of 256 bits, and the exponent of the ``djn`` randomness
of row ``i`` is the ``i``-th block of ``SHAKE256(K, nonce)``, where ``K`` is a hash of the private
key. The nonce travels with the ciphertexts. A holder of the key computes the exponents again, and
of a weighted sum their weighted sum ``R``: ``c h^(-n^s R) = (1+n)^m`` needs one product for each
window of bits of the order and no exponentiation, and holds only where the result is 1 modulo each
factor, which is checked; otherwise the ciphertext is decrypted in the usual way.

Without ``K`` the exponents are as good as drawn at random, in the random oracle model: ``K`` and
the streams are uniform unless the hash is queried on the factors of ``n``, and to find those is
to break the encryption anyway. So confidentiality rests on what ``djn`` randomness rests on, and
on that model for SHA-256 and SHAKE256. ``K`` is worth the private key: it gives no factors, but who
has it reads every vector that names nonces. Exponents have the same number of bits as drawn ones.
Two encryptions never share a nonce, also not those of the same values. A decryptor of a sum sees
the nonces and the weight of each, but not whose they are. Holders of threshold shares know no
``K``, and their exponents are drawn.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence

from bract.paillier.errors import CiphertextError
from bract.paillier.keys import PrivateKey

Parts = tuple[tuple[str, int], ...]
"""Nonce in hexadecimal digits, and integer weight, of each encryption in a sum."""

MOST_PARTS = 1000
"""Most parts that a vector names: with as many, deriving takes as long as it saves."""

_NONCE_BYTES = 32
_NONCE = re.compile(r"[0-9a-f]{64}")


def fresh_part() -> Parts:
    """Return the one part of a fresh vector, with a nonce of its own."""
    return ((secrets.token_bytes(_NONCE_BYTES).hex(), 1),)


def joined_parts(found: Sequence[tuple[Parts, int]]) -> Parts:
    """Return the parts of a weighted sum; none where one vector has none, or there are too many.

    They are sorted by nonce: the order of the vectors would reveal whose weight is which.

    Args:
        found: Parts and positive weight of each vector.
    """
    joined = sorted((nonce, weight * inner) for parts, weight in found for nonce, inner in parts)
    complete = all(parts for parts, _ in found) and len(joined) <= MOST_PARTS
    return tuple(joined) if complete else ()


def check_parts(parts: Parts, weight: int) -> None:
    """Raise :class:`CiphertextError` unless the parts are none, or ones that sum to ``weight``."""
    if not parts:
        return
    well_formed = len(parts) <= MOST_PARTS and all(
        isinstance(n, str) and _NONCE.fullmatch(n) and type(w) is int and w > 0 for n, w in parts
    )
    if not well_formed or sum(w for _, w in parts) != weight:
        raise CiphertextError(
            f"the parts of a vector are damaged: expected up to {MOST_PARTS} nonces of 64 digits "
            f"with positive weights that sum to {weight}"
        )


def derived_exponents(key: PrivateKey, parts: Parts, rows: int) -> list[int]:
    """Return the exponents of the randomness of each row of a vector of these parts."""
    bits = key.public.exponent_bits
    size = (bits + 7) // 8
    mask = (1 << bits) - 1
    sums = [0] * rows
    secret = _secret(key)
    for nonce, weight in parts:
        stream = hashlib.shake_256(secret + bytes.fromhex(nonce)).digest(size * rows)
        for row in range(rows):
            block = stream[size * row : size * (row + 1)]
            sums[row] += weight * (int.from_bytes(block, "little") & mask)
    return sums


def _secret(key: PrivateKey) -> bytes:
    size = (key.public.bits + 7) // 8
    first, second = sorted((int(key.p), int(key.q)))
    text = first.to_bytes(size, "big") + second.to_bytes(size, "big")
    return hashlib.sha256(b"bract djn exponents 1" + text).digest()
