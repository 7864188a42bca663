"""Sums of encrypted vectors, for holders of the public key alone.

Paillier is *malleable*: a product of ciphertexts is a ciphertext of the sum, and a power one of a
multiple. Rows are taken in chunks, so that vectors may be in files (``numpy.memmap``): then a sum
takes the memory of its result and of one chunk, however many vectors there are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bract.paillier.cipher import (
    CipherVector,
    from_matrix,
    public_of,
    require_key,
    scheme_of,
    to_matrix,
)
from bract.paillier.derived import joined_parts
from bract.paillier.errors import CiphertextError, PaillierError
from bract.paillier.keys import PrivateKey, PublicKey, Randomness
from bract.paillier.parallel import Progress, map_chunks
from bract.paillier.powers import Schedule
from bract.paillier.scheme import Scheme


def weighted_sum(
    key: PublicKey | PrivateKey,
    vectors: Sequence[CipherVector],
    weights: Sequence[int],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> CipherVector:
    """Return the encryption of ``sum_i weights[i] * vectors[i]``.

    Args:
        key: The public key, which is all a server has.
        vectors: Vectors under this key and of one layout.
        weights: One non-negative integer each, public (see :func:`integer_weights`).
        threads: None takes all cores.
        progress: Called with (ciphertexts done, ciphertexts in total).

    Raises:
        CapacityError: The weights, times those already inside, could overflow a slot.
        KeyMismatchError: A vector of another key.
        CiphertextError: Layouts differ, or a number that is no ciphertext.
    """
    if len(vectors) != len(weights) or not vectors:
        raise PaillierError(f"{len(vectors)} vectors and {len(weights)} weights do not pair up")
    layout = vectors[0].layout
    for position, vector in enumerate(vectors):
        require_key(key, vector)
        if vector.layout != layout:
            raise CiphertextError(
                f"vector {position} has the layout {vector.layout}, the first has {layout}"
            )
    weights = [int(weight) for weight in weights]
    total = layout.require([w * v.weight for w, v in zip(weights, vectors, strict=True)])
    scheme = scheme_of(key, layout)
    used = [(v, w) for v, w in zip(vectors, weights, strict=True) if w]
    matrices, factors = [v.data for v, _ in used], [w for _, w in used]
    data = product_rows(scheme, matrices, factors, threads=threads, progress=progress)
    confined = all(vector.randomness == "djn" for vector, _ in used)
    randomness: Randomness = "djn" if confined else "standard"
    parts = joined_parts([(vector.parts, weight) for vector, weight in used])
    return CipherVector(public_of(key).key_id, layout, data, total, randomness, parts)


def product_rows(
    scheme: Scheme,
    matrices: Sequence[NDArray[np.uint8]],
    weights: Sequence[int],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> NDArray[np.uint8]:
    """Return the products ``prod_i matrices[i][row] ** weights[i]`` modulo ``n^(s+1)``.

    Args:
        scheme: Key and degree.
        matrices: ``uint8`` of one shape ``(rows, cipher_bytes)``, big-endian numbers.
        weights: One positive integer each.
        threads: None takes all cores.
        progress: Called with (rows done, rows in total).

    Returns:
        ``uint8``, the shape of one of ``matrices``.

    Raises:
        CiphertextError: A number that is no ciphertext.
    """
    schedule = Schedule(weights)

    def multiply(rows: Sequence[int]) -> list[Any]:
        columns = []
        for matrix in matrices:
            column = from_matrix(np.asarray(matrix[rows[0] : rows[-1] + 1]))
            scheme.check(column, rows[0])
            columns.append(column)
        return [scheme.weighted_product(row, schedule) for row in zip(*columns, strict=True)]

    products = map_chunks(multiply, range(len(matrices[0])), threads=threads, progress=progress)
    return to_matrix(products, scheme.cipher_bytes)
