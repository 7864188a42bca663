"""Read a client's Paillier key, check that it fits the run, and make its tables once.

Each message is answered by a process of its own. What it had to make for a key, it names to the
fork server (`bract.runtime.fork_server`), which makes it for the processes to come: the tables of
powers take as long as the encryption of a small model.
"""

from __future__ import annotations

from pathlib import Path

from bract.client.private import own_files
from bract.config import FederationConfig
from bract.errors import BractError
from bract.paillier import PrivateKey, prepare
from bract.paillier.sharing import KeyShare
from bract.protocol.keyfiles import Key, read_key_file

_read: set[tuple[str, int, str]] = set()
_prepared: set[tuple[str, int, str]] = set()


def read_key(path: Path | None, degree: int) -> Key:
    """Read the key file that the node config names, for ciphertexts of a degree."""
    if path is None:
        raise BractError(
            "the run encrypts updates, but the node config names no key; run `bract keygen` once "
            "and start every SuperNode with --node-config 'paillier-key=\"FILE\"', or set "
            "encryption.keys: in-band",
            code="key-missing",
        )
    with own_files():
        key = read_key_file(path)
    _read.add((str(path.absolute()), degree, key.public.key_id))
    return key


def unprepared() -> list[tuple[str, int]]:
    """Return path and degree of each key that this process read and found no tables for."""
    return [(path, degree) for path, degree, _ in sorted(_read - _prepared)]


def prepare_key(path: Path, degree: int) -> None:
    """Make the tables of a key for the processes that are forked from this one."""
    key = read_key_file(path)
    _prepared.add((str(path), degree, key.public.key_id))
    if isinstance(key, PrivateKey):
        prepare(key, degree)


def check_key(key: Key, config: FederationConfig) -> None:
    """Refuse a key that does not fit the run."""
    section = config.encryption
    if key.public.bits != section.key_bits:
        raise BractError(
            f"key {key.public.key_id} has {key.public.bits} bits, encryption.key_bits is "
            f"{section.key_bits}",
            code="key-mismatch",
        )
    if section.randomness == "djn" and key.public.h is None:
        raise BractError(
            f"key {key.public.key_id} was made for standard randomness, encryption.randomness is "
            "djn; set it to standard or generate another key",
            code="key-mismatch",
        )
    if section.threshold is None:
        if isinstance(key, KeyShare):
            raise BractError(
                f"holds a key share ({key.threshold} of {key.total} decrypt together), but "
                f"encryption.threshold is not set; set it to {key.threshold}",
                code="key-mismatch",
            )
        return
    if not isinstance(key, KeyShare):
        raise BractError(
            f"holds a whole private key, but encryption.threshold is {section.threshold}; give it "
            "its own share (bract keygen --threshold), and no client the whole key",
            code="key-mismatch",
        )
    found = (key.threshold, key.degree)
    if found != (section.threshold, section.degree):
        raise BractError(
            f"holds a share of a key with threshold {found[0]} for degree {found[1]}; the run has "
            f"encryption.threshold {section.threshold} and degree {section.degree}",
            code="key-mismatch",
        )
    if section.randomness == "standard" and key.public.h is not None:
        raise BractError(
            "holds a share of a djn key, which does not decrypt standard randomness; set "
            "encryption.randomness: djn",
            code="key-mismatch",
        )
