"""A client's Paillier key as text or file: the whole private key, or one share of it."""

from __future__ import annotations

from pathlib import Path

from bract.disk import read_named
from bract.errors import BractError, one_line
from bract.paillier import PrivateKey
from bract.paillier.keyfile import dump_private, load_private, read_private
from bract.paillier.sharefile import dump_share, load_share, read_share
from bract.paillier.sharing import KeyShare
from bract.protocol.ciphertexts import readable

Key = PrivateKey | KeyShare


def read_key_file(path: Path) -> Key:
    """Read a private key or key share that `bract keygen` wrote."""
    try:
        text = read_named(path)
        with readable():
            return read_share(path) if _is_share(text) else read_private(path)
    except OSError as error:
        raise BractError(
            f"{path}: the key cannot be read ({one_line(error, 200)})", code="file-unreadable"
        ) from error


def parse_key(text: bytes) -> Key:
    """Read the text of a key."""
    with readable():
        return load_share(text) if _is_share(text) else load_private(text)


def dump_key(key: Key) -> bytes:
    """Return the text of a key, unencrypted."""
    return dump_share(key) if isinstance(key, KeyShare) else dump_private(key)


def _is_share(text: bytes) -> bool:
    return b"BRACT PAILLIER KEY SHARE" in text
