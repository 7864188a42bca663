"""Shamir's secret sharing of byte strings, over GF(2^128) as PyCryptodome does it.

Shamir, "How to share a secret", Communications of the ACM 22 (1979). The secret is padded (PKCS #7)
and cut into chunks of 16 bytes, each the constant term of a random polynomial of degree
``threshold - 1``; fewer than ``threshold`` shares are independent of the secret.
"""

from __future__ import annotations

from Crypto.Protocol.SecretSharing import Shamir
from Crypto.Util.Padding import pad, unpad

_CHUNK = 16
_INDEX = 4


def create_shares(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return shares of a secret, of which any ``threshold`` give it back.

    Each holds its index from 1 on (4 bytes, little endian), then 16 bytes a chunk.
    """
    padded = pad(secret, _CHUNK)
    shares = [(index + 1).to_bytes(_INDEX, "little") for index in range(number)]
    for start in range(0, len(padded), _CHUNK):
        split = Shamir.split(threshold, number, padded[start : start + _CHUNK], ssss=False)
        shares = [share + part for share, (_, part) in zip(shares, split, strict=True)]
    return shares


def combine_shares(shares: list[bytes]) -> bytes:
    """Return the secret of ``threshold`` shares.

    Raises
    ------
    ValueError
        If the shares are of different lengths, two have one index, or what they give is no padded
        secret.
    """
    length = len(shares[0])
    if any(len(share) != length for share in shares):
        raise ValueError("shares of different lengths")
    padded = b"".join(
        Shamir.combine(
            [
                (int.from_bytes(share[:_INDEX], "little"), share[start : start + _CHUNK])
                for share in shares
            ],
            ssss=False,
        )
        for start in range(_INDEX, length, _CHUNK)
    )
    return unpad(padded, _CHUNK)
