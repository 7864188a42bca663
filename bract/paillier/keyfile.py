"""Keys as text: PEM-like blocks whose body is base64 of JSON, with a checksum over every field.

The text may come from a file or, public keys, from an untrusted party: sizes are bounded before a
number is made of it, and whatever is wrong raises :class:`PaillierError`.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import stat
import textwrap
from collections.abc import Mapping
from pathlib import Path

from bract.disk.permissions import open_private
from bract.paillier.errors import PaillierError
from bract.paillier.exchange import Identity, identity_of
from bract.paillier.keys import PrivateKey, PublicKey, check_size

_BLOCK = re.compile(
    r"\s*-----BEGIN BRACT PAILLIER ([A-Z ]+)-----\s*(.*?)\s*-----END BRACT PAILLIER \1-----\s*",
    re.DOTALL,
)
_VERSION = 2
MOST_BYTES = 1 << 22
"""Largest text of a key: a thousand verification keys of 3072 bits take half of it."""
_NUMBER = re.compile(r"0x[0-9a-f]{1,2048}")


def dump_public(key: PublicKey) -> bytes:
    """Return the text of a public key."""
    return encode_block("PUBLIC KEY", public_fields(key))


def load_public(text: bytes, *, insecure: bool = False) -> PublicKey:
    """Read what :func:`dump_public` wrote.

    Raises:
        PaillierError: Not a public key, damaged, or of a size that is not offered.
    """
    return public_from_fields(decode_block("PUBLIC KEY", text), insecure=insecure)


def dump_private(key: PrivateKey) -> bytes:
    """Return the text of a private key, unencrypted."""
    fields = public_fields(key.public) | {
        name: hex(getattr(key, name)) for name in ("p", "q", "order_p", "order_q")
    }
    return encode_block("PRIVATE KEY", fields)


def load_private(text: bytes, *, insecure: bool = False) -> PrivateKey:
    """Read what :func:`dump_private` wrote, and check the key's numbers against each other.

    Raises:
        PaillierError: Not a private key, damaged, or of a size that is not offered.
    """
    fields = decode_block("PRIVATE KEY", text)
    public = public_from_fields(fields, insecure=insecure)
    secret = [integer_field(fields, name) for name in ("p", "q", "order_p", "order_q")]
    return PrivateKey(public, *secret)


def save_public(key: PublicKey, path: Path | str) -> None:
    """Write a public key file; an existing file is not overwritten."""
    write_file(path, dump_public(key))


def save_private(key: PrivateKey, path: Path | str) -> None:
    """Write a private key file with mode 0600; an existing file is not overwritten."""
    write_file(path, dump_private(key))


def read_public(path: Path | str, *, insecure: bool = False) -> PublicKey:
    """Read a public key file; errors name the file."""
    try:
        return load_public(Path(path).read_bytes(), insecure=insecure)
    except PaillierError as error:
        raise PaillierError(f"{path}: {error}") from error


def read_private(path: Path | str, *, insecure: bool = False) -> PrivateKey:
    """Read a private key file; errors name it, and one that others may read is refused."""
    text = read_secret(path)
    try:
        return load_private(text, insecure=insecure)
    except PaillierError as error:
        raise PaillierError(f"{path}: {error}") from error


def dump_identity(identity: Identity) -> bytes:
    """Return the text of a site's X25519 key pair, unencrypted."""
    fields: dict[str, str | int] = {"version": _VERSION, "private": identity.private.hex()}
    return encode_block("IDENTITY", fields)


def save_identity(identity: Identity, path: Path | str) -> None:
    """Write a site's X25519 key pair with mode 0600; an existing file is not overwritten."""
    write_file(path, dump_identity(identity))


def read_identity(path: Path | str) -> Identity:
    """Read what :func:`save_identity` wrote; errors name the file.

    Raises:
        PaillierError: Not an identity, damaged, or a file that others may read.
    """
    text = read_secret(path)
    try:
        fields = decode_block("IDENTITY", text)
        return identity_of(bytes.fromhex(str(fields.get("private"))))
    except ValueError as error:
        raise PaillierError(f"{path}: {error}") from error


def write_file(path: Path | str, text: bytes) -> None:
    """Write a new file of mode 0600, and leave none where writing fails.

    Raises:
        FileExistsError: The file exists; a key in use must not be replaced silently.
    """
    target = Path(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = open_private(target, flags, private=True)
    except FileExistsError as error:
        raise FileExistsError(
            f"{target} exists: remove it first, or choose another name for the new key"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        raise


def read_secret(path: Path | str) -> bytes:
    """Read a file that only its owner may read.

    Raises:
        PaillierError: Others may read or write it, or it is larger than any key.
        OSError: It cannot be read.
    """
    with Path(path).open("rb") as stream:
        mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
        if mode & 0o077:
            raise PaillierError(
                f"{path}: other users may read this key (mode {mode:04o}); run `chmod 600 {path}`, "
                "and make a new key if somebody else was on this machine"
            )
        return stream.read(MOST_BYTES + 1)


def public_fields(key: PublicKey) -> dict[str, str | int]:
    """Return a public key as JSON-ready fields."""
    fields: dict[str, str | int] = {"version": _VERSION, "n": hex(key.n)}
    if key.h is not None:
        fields |= {"h": hex(key.h), "exponent_bits": key.exponent_bits}
    return fields


def public_from_fields(fields: dict[str, object], *, insecure: bool) -> PublicKey:
    """Read a public key from JSON fields, refusing sizes that are not offered."""
    n = integer_field(fields, "n")
    check_size(n.bit_length(), insecure=insecure)
    if "h" not in fields:
        return PublicKey(n)
    return PublicKey(n, integer_field(fields, "h"), integer_field(fields, "exponent_bits"))


def integer_field(fields: dict[str, object], name: str) -> int:
    """Return one number of a key: a small JSON integer, or hexadecimal text of up to 8192 bits."""
    value = fields.get(name)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value, 16)
    return small_field(fields, name)


def small_field(fields: dict[str, object], name: str) -> int:
    """Return one small JSON integer of a key."""
    value = fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31:
        return value
    raise PaillierError(f"the key's field {name!r} is missing, not a number, or out of range")


def encode_block(label: str, fields: Mapping[str, str | int | list[str]]) -> bytes:
    """Return a text block named ``label`` that carries ``fields`` and their checksum."""
    content = {**fields, "checksum": _checksum(label, fields)}
    body = base64.b64encode(json.dumps(content, sort_keys=True).encode()).decode()
    lines = "\n".join(textwrap.wrap(body, 64))
    name = f"BRACT PAILLIER {label}"
    return f"-----BEGIN {name}-----\n{lines}\n-----END {name}-----\n".encode()


def decode_block(label: str, text: bytes) -> dict[str, object]:
    """Return the fields of a text block.

    Raises:
        PaillierError: No such block, another kind of block, or a damaged body.
    """
    if len(text) > MOST_BYTES:
        raise PaillierError(f"a key has at most {MOST_BYTES} bytes of text, found {len(text)}")
    match = _BLOCK.fullmatch(text.decode("ascii", errors="replace"))
    if match is None:
        raise PaillierError(f"expected a BRACT PAILLIER {label} block, found none or a cut one")
    if match[1] != label:
        raise PaillierError(f"expected a BRACT PAILLIER {label} block, found {match[1]}")
    try:
        fields = json.loads(base64.b64decode("".join(match[2].split()), validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        # A ValueError: text that is not ASCII or not UTF-8, no JSON, or a number without end.
        raise PaillierError(
            f"the body of the {label} block is damaged ({type(error).__name__}); restore the file"
        ) from error
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise PaillierError(
            f"the {label} block is not of version {_VERSION}: it was made by another bract; run "
            "`bract keygen` again"
        )
    stated = fields.pop("checksum", None)
    if stated != _checksum(label, fields):
        raise PaillierError(
            f"the {label} block is damaged: its checksum does not fit its fields; restore the file"
        )
    return fields


def _checksum(label: str, fields: Mapping[str, object]) -> str:
    """Return the SHA-256 of all fields: it finds damage, and nothing of an attacker's."""
    return hashlib.sha256(f"{label}\n{json.dumps(fields, sort_keys=True)}".encode()).hexdigest()
