"""Partially homomorphic encryption of model updates.

One round, in four calls: every client encrypts its update with :func:`encrypt`, the server, which
holds the :class:`PublicKey` only, joins them with :func:`weighted_sum`, and every client reads the
weighted mean with :func:`decrypt`. They share a :class:`Layout`, whose slots make an overflow
impossible. With :func:`deal`, :func:`partial_decrypt` and :func:`combine` no client can decrypt
alone. Attacks that the scheme cannot see are listed in :mod:`bract.paillier.cipher`.
"""

from bract.paillier.cipher import decrypt, encrypt, prepare
from bract.paillier.errors import PaillierError
from bract.paillier.keys import PrivateKey, PublicKey, generate_keypair
from bract.paillier.packing import Layout
from bract.paillier.sharing import deal
from bract.paillier.summing import weighted_sum
from bract.paillier.threshold import combine, partial_decrypt

__all__ = [
    "Layout",
    "PaillierError",
    "PrivateKey",
    "PublicKey",
    "combine",
    "deal",
    "decrypt",
    "encrypt",
    "generate_keypair",
    "partial_decrypt",
    "prepare",
    "weighted_sum",
]
