"""Threshold decryption: any ``t`` of ``l`` key shares decrypt together, fewer learn nothing.

Each party applies its share (:func:`partial_decrypt`), and who holds ``t`` results joins them
(:func:`combine`); :mod:`bract.paillier.sharing` deals the shares and has the mathematics.

What it protects: one client and the server together hold one share and read nothing. What it does
not: ``t`` clients together read everything, a share's owner cannot distinguish an aggregate from a
single client's vector before helping to decrypt it, and ``t`` partial decryptions together give
the result, so they must travel sealed (:mod:`bract.paillier.exchange`), never in clear through the
server. The dealer sees the factors and must forget them.

Against parties that do not follow the protocol: a share is applied only to what is proven to be
``n^s``-th powers, so no choice of ciphertexts reads the share; and every partial decryption carries
a proof (:mod:`bract.paillier.proofs`), without which it is refused by the number of its share.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier.cipher import CipherVector, checked_rows, decode, require_key, to_matrix
from bract.paillier.errors import CiphertextError, PartialError, ThresholdError, UndecryptableError
from bract.paillier.parallel import Progress, map_chunks
from bract.paillier.powers import Schedule, series_logarithm
from bract.paillier.proofs import Proof, Statement, prove, same_powers, verify
from bract.paillier.scheme import Scheme, scheme_for
from bract.paillier.sharing import KeyShare, lagrange
from bract.paillier.stripping import strip_messages


@dataclass(frozen=True, eq=False)
class PartialDecryption:
    """One share's result on one vector.

    Attributes:
        key_id: Identity of the key.
        index: Number of the share.
        digest: SHA-256 of the vector, so that answers to different vectors are never combined.
        data: ``uint8``, the shape of the vector's data.
        proof: That the share made ``data`` from the vector.
    """

    key_id: str
    index: int
    digest: str
    data: NDArray[np.uint8]
    proof: Proof

    def header(self) -> dict[str, Any]:
        """Return everything but ``data``, ready for JSON."""
        return {
            "key_id": self.key_id,
            "index": self.index,
            "digest": self.digest,
            "challenge": hex(self.proof.challenge),
            "response": hex(self.proof.response),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], data: NDArray[np.uint8]) -> "PartialDecryption":
        """Join a header and its data.

        Raises:
            ThresholdError: A field is missing, unknown or of another type or size.
        """
        texts = {"key_id": 64, "digest": 64, "challenge": 64, "response": 8192}
        index = header.get("index")
        if (
            set(header) != {"index", *texts}
            or not isinstance(index, int)
            or not all(isinstance(header[k], str) and len(header[k]) <= n for k, n in texts.items())
        ):
            raise ThresholdError("the header of a partial decryption is damaged")
        try:
            proof = Proof(int(header["challenge"], 16), int(header["response"], 16))
        except ValueError as error:
            raise ThresholdError("the proof of a partial decryption is no number") from error
        return cls(header["key_id"], index, header["digest"], data, proof)


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
        progress: Called with (ciphertexts done, ciphertexts in total).

    Raises:
        KeyMismatchError: The vector belongs to another key.
        CiphertextError: Another degree or kind of randomness, a number that is no ciphertext, or
            ``stripped`` is not what :func:`strip_messages` makes of the vector: a share that is
            applied to anything else is given away.
    """
    require_key(share.public, vector)
    _require_kind(share, vector)
    scheme = scheme_for(share.public, share.degree)
    given = stripped is not None
    if stripped is None:
        stripped = strip_messages(share.public, vector, threads=threads)
    bases = checked_rows(
        scheme, dataclasses.replace(vector, data=stripped), range(vector.layout.rows)
    )
    if given and not same_powers(scheme, _numbers(scheme, vector), bases, threads=threads):
        raise CiphertextError(
            "the stripped ciphertexts are not the n-th powers of the vector: whoever sent them "
            "made a mistake, or asks for this key share; nothing was decrypted"
        )
    exponent = 2 * math.factorial(share.total) * share.value

    def apply(numbers: Sequence[Any]) -> list[Any]:
        return list(gmpy2.powmod_base_list(list(numbers), exponent, scheme.cipher_modulus))

    powers = map_chunks(apply, bases, threads=threads, progress=progress)
    data, digest = to_matrix(powers, scheme.cipher_bytes), _digest(vector)
    statement = Statement(share, share.index, digest, data)
    proof = prove(scheme, statement, bases, powers, threads=threads)
    return PartialDecryption(vector.key_id, share.index, digest, data, proof)


def problem(
    share: KeyShare,
    vector: CipherVector,
    partial: PartialDecryption,
    *,
    threads: int | None = None,
) -> str | None:
    """Return what is wrong with a partial decryption of ``vector``, None if it is proven right.

    Args:
        share: The verifier's share; its own index and value play no part.
        vector: The vector that was to be decrypted.
        partial: What a share's owner sent.
        threads: None takes all cores.
    """
    name = f"share {partial.index}"
    if partial.key_id != vector.key_id:
        return f"{name} belongs to key {partial.key_id}, the vector to {vector.key_id}"
    if partial.digest != _digest(vector) or partial.data.shape != vector.data.shape:
        return f"{name} decrypted another vector than this one"
    if not 1 <= partial.index <= share.total:
        return f"{name} of {share.total} does not exist"
    scheme = scheme_for(share.public, vector.layout.degree)
    try:
        powers = _numbers(scheme, dataclasses.replace(vector, data=partial.data))
    except CiphertextError as error:
        return f"{name}: {error}"
    statement = Statement(share, partial.index, partial.digest, partial.data)
    ciphertexts = _numbers(scheme, vector)
    if verify(scheme, statement, ciphertexts, powers, partial.proof, threads=threads):
        return None
    return (
        f"the partial decryption of {name} is not proven: it was altered, or made with another "
        "share than the dealer gave"
    )


def combine(
    share: KeyShare,
    vector: CipherVector,
    partials: Sequence[PartialDecryption],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """Decrypt a vector from at least ``t`` partial decryptions of it.

    Args:
        share: A share of the key, for its verification keys; it decrypts nothing here.
        vector: The vector that was partially decrypted.
        partials: Of different shares; all are verified, and ``t`` of them used.
        threads: None takes all cores.
        progress: Called with (ciphertexts done, ciphertexts in total).

    Returns:
        ``float64`` of shape ``(layout.length,)``, as :func:`bract.paillier.cipher.decrypt` gives.

    Raises:
        PartialError: One is of another key or vector, or not proven; it names the share.
        ThresholdError: Fewer than ``t``, or one twice.
        KeyMismatchError: A vector of another key.
        UndecryptableError: They do not fit together, or give what no codes of this weight can.
    """
    require_key(share.public, vector)
    _require_kind(share, vector)
    found = [problem(share, vector, part, threads=threads) for part in partials]
    wrong = {position: text for position, text in enumerate(found) if text is not None}
    if wrong:
        raise PartialError("; ".join(wrong.values()), tuple(wrong))
    chosen = _choose(share, partials)
    scheme = scheme_for(share.public, vector.layout.degree)
    delta = math.factorial(share.total)
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
                raise UndecryptableError(
                    f"the partial decryptions of ciphertext {row} by shares "
                    f"{[part.index for part in chosen]} do not fit together, though each is "
                    "proven: the dealer's shares are wrong, or the ciphertext's randomness is"
                )
            logarithm = series_logarithm(u, scheme.n, scheme.degree)
            plaintexts.append(logarithm * scale % scheme.plain_modulus)
        return plaintexts

    plaintexts = map_chunks(join, range(vector.layout.rows), threads=threads, progress=progress)
    return decode(vector, plaintexts)


def _choose(share: KeyShare, partials: Sequence[PartialDecryption]) -> list[PartialDecryption]:
    indices = sorted(part.index for part in partials)
    if len(set(indices)) < len(indices):
        raise ThresholdError(f"shares answered more than once: {indices}")
    if len(indices) < share.threshold:
        raise ThresholdError(
            f"{len(indices)} of {share.total} clients answered (shares {indices}), "
            f"{share.threshold} are needed to decrypt: wait for more clients, or restart those "
            "that are missing"
        )
    return sorted(partials, key=lambda part: part.index)[: share.threshold]


def _numbers(scheme: Scheme, vector: CipherVector) -> list[Any]:
    return checked_rows(scheme, vector, range(vector.layout.rows))


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
