"""Threshold decryption: any ``t`` of ``l`` key shares decrypt together, fewer learn nothing.

Each party applies its share (:func:`partial_decrypt`), and who holds ``t`` results joins them
(:func:`combine`); :mod:`bract.paillier.sharing` deals the shares and has the mathematics.

What it protects: one client and the server together hold one share and read nothing. What it does
not: ``t`` clients together read everything, a share's owner cannot tell an aggregate from a single
client's vector before helping to decrypt it, and whoever collects ``t`` partial decryptions reads
the result, so they must travel sealed (:mod:`bract.paillier.exchange`), never in clear through the
server. The dealer sees the factors and must forget them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier.cipher import CipherVector, checked_rows, decode, require_key, to_matrix
from bract.paillier.errors import CiphertextError, KeyMismatchError, ThresholdError
from bract.paillier.keys import PublicKey
from bract.paillier.parallel import Progress, map_chunks
from bract.paillier.powers import Schedule, series_logarithm
from bract.paillier.scheme import Scheme, scheme_for
from bract.paillier.sharing import KeyShare, lagrange


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


def strip_messages(
    public: PublicKey,
    vector: CipherVector,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.uint8]:
    """Raise every ciphertext to ``n^s``, which leaves its randomness only.

    The same for every client and without secrets: a server computes it once and sends it along,
    or each client computes it for itself, at several times the cost of its partial decryption.

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


def partial_decrypt(
    share: KeyShare,
    vector: CipherVector,
    stripped: NDArray[np.uint8] | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> PartialDecryption:
    """Apply one share to a vector.

    Args:
        share: The share.
        vector: A vector under its key and of its degree.
        stripped: What :func:`strip_messages` made of the vector; None computes it here.
        threads: None takes all cores.
        progress: Told (ciphertexts done, ciphertexts in total).

    Raises:
        KeyMismatchError: The vector belongs to another key.
        CiphertextError: Another degree or kind of randomness, a number that is no ciphertext, or
            ``stripped`` of another shape.
    """
    require_key(share.public, vector)
    _require_kind(share, vector)
    if stripped is None:
        stripped = strip_messages(share.public, vector, threads=threads)
    base = dataclasses.replace(vector, data=stripped)
    scheme = scheme_for(share.public, share.degree)
    exponent = 2 * math.factorial(share.total) * share.value

    def apply(rows: Sequence[int]) -> list[Any]:
        numbers = checked_rows(scheme, base, rows)
        return list(gmpy2.powmod_base_list(numbers, exponent, scheme.cipher_modulus))

    powers = map_chunks(apply, range(vector.layout.rows), threads=threads, progress=progress)
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
    exponents = [2 * e for e in lagrange([part.index for part in chosen], delta)]
    above = Schedule([max(e, 0) for e in exponents])
    below = Schedule([max(-e, 0) for e in exponents])
    scale = _scale(scheme, delta)

    def join(rows: Sequence[int]) -> list[Any]:
        columns = [checked_rows(scheme, part, rows) for part in chosen]
        messages = gmpy2.powmod_base_list(
            checked_rows(scheme, vector, rows), 4 * delta**2, scheme.cipher_modulus
        )
        plaintexts = []
        for row, message, *powers in zip(rows, messages, *columns, strict=True):
            divisor = gmpy2.invert(scheme.weighted_product(powers, below), scheme.cipher_modulus)
            u = message * scheme.weighted_product(powers, above) * divisor % scheme.cipher_modulus
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


def _scale(scheme: Scheme, delta: int) -> Any:
    unit = series_logarithm(1 + scheme.n, scheme.n, scheme.degree)
    return gmpy2.invert(4 * delta**2 * unit, scheme.plain_modulus)


def _require_kind(share: KeyShare, vector: CipherVector) -> None:
    if vector.layout.degree != share.degree:
        raise CiphertextError(
            f"the vector has degree {vector.layout.degree}, the key shares were dealt for "
            f"{share.degree}: plan the layout with degree={share.degree}"
        )
    if vector.randomness == "standard" and share.public.randomness == "djn":
        raise CiphertextError(
            "shares of a djn key do not decrypt standard randomness: encrypt with djn, or deal "
            "the key with randomness='standard'"
        )


def _digest(vector: CipherVector) -> str:
    header = json.dumps(vector.header(), sort_keys=True).encode()
    return hashlib.sha256(header + vector.data.tobytes()).hexdigest()
