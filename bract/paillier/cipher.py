"""Encrypted vectors: encrypt and decrypt; :mod:`bract.paillier.summing` adds and weighs them.

The server computes with public keys only: it sees ciphertexts, their number, the layout and the
weights. Two limits belong to the scheme itself. Paillier is *malleable*: any holder of the public
key can turn a ciphertext into one of another value, undetectably, so integrity has to come
from the transport (TLS) and from trust in the server. And a holder of the private key can read
every single ciphertext, not only the sum (see :mod:`bract.paillier.threshold`).

Damage is another matter: wrong shapes, numbers out of range and foreign key ids are always
refused. A corrupted ciphertext decrypts to a random number, which leaves the hidden subgroup
(``djn`` keys: refused, but for a chance below 2^-500) or the slots' range (``standard`` keys:
refused, but for a chance that depends on the layout, see :meth:`Layout.unpack`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gmpy2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bract.paillier.derived import Parts, check_parts, derived_exponents, fresh_part
from bract.paillier.errors import CiphertextError, KeyMismatchError, PaillierError
from bract.paillier.keys import PrivateKey, PublicKey, Randomness
from bract.paillier.packing import Layout
from bract.paillier.parallel import Progress, available_cores, map_chunks
from bract.paillier.scheme import PrivateScheme, Scheme, scheme_for

_PREPARED_ROWS = 5_000
"""Ciphertexts for which :func:`prepare` makes tables. Wider ones leave the processor's caches."""


@dataclass(frozen=True, eq=False)
class CipherVector:
    """A vector of ciphertexts, and what is public about it.

    Attributes:
        key_id: Identity of the key, :attr:`PublicKey.key_id`.
        layout: Positions of the values.
        data: ``uint8``, shape ``(layout.rows, layout.cipher_bytes)``; big-endian numbers.
        weight: Sum of the integer weights inside; 1 for a fresh vector.
        randomness: ``djn`` only if every part was made with it.
        parts: Public nonce and weight of each encryption inside, where all were made with the
            private key (:mod:`bract.paillier.derived`).
    """

    key_id: str
    layout: Layout
    data: NDArray[np.uint8]
    weight: int = 1
    randomness: Randomness = "djn"
    parts: Parts = ()

    def __post_init__(self) -> None:
        expected = (self.layout.rows, self.layout.cipher_bytes)
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise CiphertextError(
                f"expected uint8 ciphertexts of shape {expected}, found {self.data.dtype} of "
                f"shape {self.data.shape}: truncated, or made with another layout"
            )
        if not 1 <= self.weight <= self.layout.max_weight:
            raise CiphertextError(
                f"the weight {self.weight} is outside 1 to {self.layout.max_weight}"
            )
        if self.randomness not in ("djn", "standard"):
            raise CiphertextError(f"unknown randomness {self.randomness!r}: djn or standard")
        check_parts(self.parts, self.weight)

    def header(self) -> dict[str, Any]:
        """Return everything but ``data``, ready for JSON."""
        return {
            "key_id": self.key_id,
            "layout": self.layout.to_fields(),
            "weight": self.weight,
            "randomness": self.randomness,
            "parts": [list(part) for part in self.parts],
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], data: NDArray[np.uint8]) -> "CipherVector":
        """Join a header and its data, checking the one against the other.

        Raises:
            PaillierError: A field is missing, unknown or out of range, or the shape is wrong.
        """
        try:
            fields = dict(header)
            numbers = dict(fields.pop("layout"))
            whole = [fields["weight"], *(v for name, v in numbers.items() if name != "clip")]
            if any(type(value) is not int or value.bit_length() > 63 for value in whole):
                raise TypeError("a size is no whole number of 63 bits")
            texts = (fields["key_id"], fields["randomness"])
            if not all(isinstance(t, str) and len(t) <= 64 and t.isprintable() for t in texts):
                raise TypeError("key_id or randomness is no short text")
            parts = tuple((nonce, weight) for nonce, weight in fields.pop("parts", []))
            layout = Layout(**numbers)
            return cls(layout=layout, data=data, parts=parts, **fields)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, PaillierError):
                raise
            raise CiphertextError(
                f"the header of a vector is damaged: {str(error)[:200]}"
            ) from error


def encrypt(
    key: PublicKey | PrivateKey,
    values: ArrayLike,
    layout: Layout,
    *,
    randomness: Randomness | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[CipherVector, int]:
    """Quantise, pack and encrypt a vector.

    Args:
        key: A private key gives the same ciphertexts several times faster.
        values: Real numbers, ``layout.length`` of them, any shape.
        layout: The plan shared by all clients.
        randomness: None takes ``djn`` where the key has its base, else ``standard``.
        threads: None takes one, and all cores for ``standard`` randomness without the private key:
            the products of other encryptions are so short that threads only wait for each other.
        progress: Called with (ciphertexts done, ciphertexts in total).

    Returns:
        The encrypted vector of weight 1, and the number of values that were clipped.

    Raises:
        PaillierError: NaN or infinity, another number of values, or a key of another size.
    """
    public = public_of(key)
    randomness = randomness or public.randomness
    exponents: Sequence[int] | None = None
    parts: Parts = ()
    if isinstance(key, PrivateKey) and randomness == "djn":
        parts = fresh_part()
        exponents = derived_exponents(key, parts, layout.rows)
    data, clipped = encrypt_rows(
        key, values, layout, randomness, exponents, threads=threads, progress=progress
    )
    return CipherVector(public.key_id, layout, data, 1, randomness, parts), clipped


def prepare(key: PrivateKey, degree: int) -> None:
    """Make the tables by which a private key encrypts, kept in this process and its forks.

    Args:
        key: The key; nothing is made where it has no base for ``djn`` randomness.
        degree: Degree of the ciphertexts.
    """
    if key.public.h is not None:
        scheme_for(key, degree).expect(_PREPARED_ROWS, "djn")


def encrypt_rows(
    key: PublicKey | PrivateKey,
    values: ArrayLike,
    layout: Layout,
    randomness: Randomness,
    exponents: Sequence[int] | None,
    *,
    threads: int | None,
    progress: Progress | None,
) -> tuple[NDArray[np.uint8], int]:
    """Return the ciphertexts of :func:`encrypt` and the number of values that were clipped.

    Args:
        key: The key.
        values: As for :func:`encrypt`.
        layout: As for :func:`encrypt`.
        randomness: As for :func:`encrypt`.
        exponents: Of the ``djn`` randomness of each row, secret and fresh; None draws.
        threads: As for :func:`encrypt`.
        progress: As for :func:`encrypt`.
    """
    scheme = scheme_of(key, layout)
    codes, clipped = layout.fixed_point.encode(values)
    plaintexts: Sequence[Any] = layout.pack(codes)
    scheme.expect(layout.rows, randomness)
    rows = [None] * layout.rows if exponents is None else exponents
    powers = randomness == "standard" and not isinstance(key, PrivateKey)
    ciphertexts = map_chunks(
        lambda part: [scheme.encrypt(m, randomness, r) for m, r in part],
        list(zip(plaintexts, rows, strict=True)),
        threads=(available_cores() if powers else 1) if threads is None else threads,
        progress=progress,
    )
    return to_matrix(ciphertexts, scheme.cipher_bytes), clipped


def decrypt(
    key: PrivateKey,
    vector: CipherVector,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """Decrypt a vector and return the weighted mean that it holds.

    Args:
        key: The private key.
        vector: Fresh, or a weighted sum; the sum of its weights divides.
        threads: None takes one where the randomness is known, as :func:`encrypt`, else all cores.
        progress: Called with (ciphertexts done, ciphertexts in total).

    Returns:
        ``float64`` of shape ``(layout.length,)``, within ``layout.fixed_point.bound`` of the
        weighted mean of the clipped values.

    Raises:
        KeyMismatchError: The vector belongs to another key.
        CiphertextError: A number that is no ciphertext, or damage as in the module's docstring.
    """
    require_key(key, vector)
    scheme = scheme_of(key, vector.layout)
    if not isinstance(scheme, PrivateScheme):
        raise PaillierError("decryption needs the private key")

    exponents: Sequence[int] = []
    if vector.parts and vector.randomness == "djn":
        exponents = derived_exponents(key, vector.parts, vector.layout.rows)
        scheme.expect(vector.layout.rows, "djn")
        threads = 1 if threads is None else threads

    def open_rows(rows: Sequence[int]) -> list[Any]:
        numbers = checked_rows(scheme, vector, rows)
        part = exponents[rows[0] : rows[-1] + 1]
        known = scheme.decrypt_known(numbers, part) if part else None
        return known or scheme.decrypt(numbers, vector.randomness, rows[0])

    opened = map_chunks(open_rows, range(vector.layout.rows), threads=threads, progress=progress)
    return decode(vector, opened)


def decode(vector: CipherVector, plaintexts: Sequence[Any]) -> NDArray[np.float64]:
    """Return the weighted mean from the decrypted plaintexts of ``vector``."""
    sums = vector.layout.unpack(plaintexts, vector.weight)
    return vector.layout.fixed_point.decode(sums, vector.weight)


def require_key(key: PublicKey | PrivateKey, vector: CipherVector) -> None:
    """Raise :class:`KeyMismatchError` where ``vector`` was not encrypted under ``key``."""
    public = public_of(key)
    if vector.key_id != public.key_id or vector.layout.key_bits != public.bits:
        raise KeyMismatchError(
            f"the vector was encrypted under key {vector.key_id} ({vector.layout.key_bits} bits), "
            f"this is key {public.key_id} ({public.bits} bits): load the key of this run"
        )


def to_matrix(numbers: Sequence[Any], size: int) -> NDArray[np.uint8]:
    """Return numbers as ``uint8`` rows of ``size`` bytes, big-endian."""
    joined = b"".join(gmpy2.mpz(c).to_bytes(size, "big") for c in numbers)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(numbers), size).copy()


def from_matrix(data: NDArray[np.uint8]) -> list[Any]:
    """Return the numbers (``mpz``) of :func:`to_matrix`'s rows."""
    return [gmpy2.mpz.from_bytes(row.tobytes(), "big") for row in data]


def checked_rows(scheme: Scheme, holder: "_HasData", rows: Sequence[int]) -> list[Any]:
    """Return some rows as numbers that can be ciphertexts under the key of ``scheme``."""
    numbers = from_matrix(holder.data[rows[0] : rows[-1] + 1])
    scheme.check(numbers, rows[0])
    return numbers


class _HasData(Protocol):
    @property
    def data(self) -> NDArray[np.uint8]: ...


def public_of(key: PublicKey | PrivateKey) -> PublicKey:
    """Return the public part of a key."""
    return key.public if isinstance(key, PrivateKey) else key


def scheme_of(key: PublicKey | PrivateKey, layout: Layout) -> Scheme:
    """Return the scheme of a key and a layout; refuse a layout for keys of another size."""
    public = public_of(key)
    if layout.key_bits != public.bits:
        raise KeyMismatchError(
            f"the layout is for keys of {layout.key_bits} bits, key {public.key_id} has "
            f"{public.bits}: plan the layout with key_bits={public.bits}"
        )
    return scheme_for(key, layout.degree)
