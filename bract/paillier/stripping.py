"""The ``n^s``-th powers of ciphertexts, which hold their randomness and nothing of their message.

A key share is applied to such powers alone (:mod:`bract.paillier.sharing`). Any party can raise a
ciphertext to ``n^s``, at some hundred microseconds a value (:func:`strip_messages`). Who encrypts
has them for the price of the encryption: a ``djn`` ciphertext is ``(1+n)^m g^r`` with
``g = h^(n^s)``, so its power is ``(g^(n^s))^r``, one more power of a fixed base with the same short
exponent (:func:`encrypt_with_powers`). They reveal nothing that the ciphertexts do not, multiply as
the ciphertexts do (:func:`combine_powers`), and are as many bytes again. What a sum of them
is checked against the sum of the ciphertexts before use (:func:`check_powers`).
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bract.paillier.cipher import (
    CipherVector,
    checked_rows,
    encrypt_rows,
    from_matrix,
    require_key,
    scheme_of,
    to_matrix,
)
from bract.paillier.errors import CiphertextError, PaillierError
from bract.paillier.keys import PublicKey
from bract.paillier.packing import Layout
from bract.paillier.parallel import Progress, map_chunks
from bract.paillier.powers import FixedBase, best_window
from bract.paillier.proofs import same_powers
from bract.paillier.scheme import scheme_for
from bract.paillier.summing import product_rows


def strip_messages(
    public: PublicKey,
    vector: CipherVector,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.uint8]:
    """Raise every ciphertext to ``n^s``, which leaves its randomness only.

    The same for every client and without secrets: where clients did not send their powers, a server
    computes it once and sends it along, at several times the cost of a partial decryption.

    Args:
        public: The key.
        vector: Any vector under it.
        threads: None takes all cores.
        progress: Called with (ciphertexts done, ciphertexts in total).

    Returns:
        ``uint8``, the shape of the vector's data.
    """
    require_key(public, vector)
    scheme = scheme_for(public, vector.layout.degree)

    def strip(rows: Sequence[int]) -> list[Any]:
        numbers = checked_rows(scheme, vector, rows)
        return list(gmpy2.powmod_base_list(numbers, scheme.plain_modulus, scheme.cipher_modulus))

    powers = map_chunks(strip, range(vector.layout.rows), threads=threads, progress=progress)
    return to_matrix(powers, scheme.cipher_bytes)


def encrypt_with_powers(
    public: PublicKey,
    values: ArrayLike,
    layout: Layout,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[CipherVector, NDArray[np.uint8], int]:
    """Encrypt as :func:`bract.paillier.cipher.encrypt` does, and return the powers as well.

    Args:
        public: A key with ``djn`` randomness.
        values: Real numbers, ``layout.length`` of them, any shape.
        layout: The plan shared by all clients.
        threads: None takes one, as :func:`bract.paillier.cipher.encrypt`.
        progress: Called with (ciphertexts done, ciphertexts in total), of the ciphertexts.

    Returns:
        The vector of weight 1, what :func:`strip_messages` makes of it, and the number of values
        that were clipped.

    Raises:
        PaillierError: As for :func:`bract.paillier.cipher.encrypt`, or a key without ``h``.
    """
    if public.h is None:
        raise PaillierError(
            f"key {public.key_id} has no base h: of standard randomness a client's power costs "
            "what the server's does, so strip_messages is for the server"
        )
    exponents = [secrets.randbits(public.exponent_bits) for _ in range(layout.rows)]
    threads = 1 if threads is None else threads
    data, clipped = encrypt_rows(
        public, values, layout, "djn", exponents, threads=threads, progress=progress
    )
    bits = public.exponent_bits
    modulus_bits = scheme_of(public, layout).cipher_modulus.bit_length()
    table = _stripped_powers(public, layout.degree, best_window(bits, modulus_bits, layout.rows))
    powers = map_chunks(lambda part: [table.power(r) for r in part], exponents, threads=threads)
    vector = CipherVector(public.key_id, layout, data, 1, "djn")
    return vector, to_matrix(powers, scheme_of(public, layout).cipher_bytes), clipped


def check_powers(
    public: PublicKey,
    vector: CipherVector,
    powers: NDArray[np.uint8],
    *,
    threads: int | None = None,
) -> None:
    """Refuse powers that are not those of a vector.

    All are checked in one equation with secret exponents of 128 bits
    (:func:`bract.paillier.proofs.same_powers`); a sign passes, and is squared away in every use.

    Args:
        public: The key.
        vector: A vector under it.
        powers: Claimed output of ``strip_messages(vector)``.
        threads: None takes all cores.

    Raises:
        CiphertextError: Another shape, a number that is no ciphertext, or no such power.
    """
    found = check_powers_form(public, vector, powers)
    scheme = scheme_for(public, vector.layout.degree)
    if not same_powers(scheme, from_matrix(vector.data), found, threads=threads):
        raise CiphertextError(
            "the powers are not the n-th powers of the ciphertexts that they came with"
        )


def check_powers_form(
    public: PublicKey, vector: CipherVector, powers: NDArray[np.uint8]
) -> list[Any]:
    """Return powers as numbers, refused where they cannot be of this vector.

    Args:
        public: The key.
        vector: A vector under it.
        powers: As for :func:`check_powers`.

    Raises:
        CiphertextError: Another shape, or a number that is no ciphertext.
    """
    require_key(public, vector)
    if powers.dtype != np.uint8 or powers.shape != vector.data.shape:
        raise CiphertextError(
            f"expected powers as uint8 of shape {vector.data.shape}, found {powers.dtype} of "
            f"shape {powers.shape}"
        )
    found = from_matrix(powers)
    scheme_for(public, vector.layout.degree).check(found)
    return found


def combine_powers(
    public: PublicKey,
    layout: Layout,
    powers: Sequence[NDArray[np.uint8]],
    weights: Sequence[int],
    *,
    threads: int | None = None,
) -> NDArray[np.uint8]:
    """Return the powers of a weighted sum from the powers of its parts.

    Args:
        public: The key.
        layout: The vectors' layout.
        powers: Of each vector, checked by :func:`check_powers`.
        weights: As for :func:`bract.paillier.summing.weighted_sum`.
        threads: None takes all cores.

    Returns:
        What :func:`strip_messages` makes of the sum, up to signs.
    """
    used = [(p, w) for p, w in zip(powers, weights, strict=True) if w]
    return product_rows(
        scheme_of(public, layout),
        [p for p, _ in used],
        [w for _, w in used],
        threads=threads,
    )


@lru_cache(maxsize=4)
def _stripped_powers(public: PublicKey, degree: int, window: int) -> FixedBase:
    scheme = scheme_for(public, degree)
    base = gmpy2.powmod(public.h, scheme.plain_modulus**2, scheme.cipher_modulus)
    return FixedBase(base, scheme.cipher_modulus, public.exponent_bits, window)
