"""Masks: ChaCha20's keystream, added to words."""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from bract.masks.layout import Words

_BLOCK = 1 << 18
"""Bytes at a time: zeros, keystream and words of a block stay in the processor's cache."""

_ZEROS = bytes(_BLOCK)


def add_mask(words: Words, seed: bytes, stream: int, *, negative: bool = False) -> None:
    """Add the mask of a seed to words in place, modulo their size; subtract it if ``negative``.

    Args:
        words: Shape ``(n,)``, contiguous.
        seed: 32 bytes, used for one round's masks.
        stream: Which of the seed's masks, at least 0: two vectors need two of them.
    """
    # RFC 8439 counts blocks in the first 4 of 16 bytes, which start at 0; the rest is the nonce.
    nonce = bytes(4) + stream.to_bytes(12, "little")
    generator = Cipher(algorithms.ChaCha20(seed, nonce), mode=None).encryptor()
    buffer = bytearray(_BLOCK)
    mask = np.frombuffer(buffer, dtype=words.dtype)
    step = _BLOCK // words.itemsize
    change = np.subtract if negative else np.add
    for start in range(0, words.size, step):
        block = words[start : start + step]
        size = block.size * words.itemsize
        generator.update_into(memoryview(_ZEROS)[:size], buffer)
        change(block, mask[: block.size], out=block)
