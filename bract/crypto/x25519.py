"""Which 32 bytes are an X25519 public key: one encoding of each key, and none of low order.

X25519 (RFC 7748) ignores the top bit and reduces what is left modulo ``2^255 - 19``, so one key has
several encodings. Keys that are compared, counted or listed have the one that key generation gives.
"""

KEY_BYTES = 32

_PRIME = 2**255 - 19

_LOW_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    }
)
"""The u-coordinates of order 1, 2, 4 and 8, on the curve and on its twist (Bernstein,
https://cr.yp.to/ecdh.html): with each of them all parties share the same secret."""


def key_problem(public: bytes) -> str | None:
    """Return why bytes are not a public key that key generation gives; None where they may be."""
    if len(public) != KEY_BYTES:
        return f"{len(public)} bytes, expected {KEY_BYTES}"
    coordinate = int.from_bytes(public, "little")
    if coordinate >= _PRIME:
        return "another encoding of a key: a number of 2^255 - 19 or more"
    if coordinate in _LOW_ORDER:
        return "a point of low order"
    return None
