"""Keys as text: PEM-like blocks whose body is base64 of JSON."""

import base64
import binascii
import json
import os
import re
import stat
import textwrap
import warnings
from pathlib import Path

from bract.paillier.errors import PaillierError
from bract.paillier.keys import PrivateKey, PublicKey, check_size

_BLOCK = re.compile(
    r"\s*-----BEGIN BRACT PAILLIER ([A-Z ]+)-----\s*(.*?)\s*-----END BRACT PAILLIER \1-----\s*",
    re.DOTALL,
)


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
    """Write a public key file, readable by everyone; an existing file is not overwritten."""
    write_file(path, dump_public(key), mode=0o644)


def save_private(key: PrivateKey, path: Path | str) -> None:
    """Write a private key file with mode 0600; an existing file is not overwritten."""
    write_file(path, dump_private(key), mode=0o600)


def read_public(path: Path | str, *, insecure: bool = False) -> PublicKey:
    """Read a public key file; errors name the file."""
    try:
        return load_public(Path(path).read_bytes(), insecure=insecure)
    except PaillierError as error:
        raise PaillierError(f"{path}: {error}") from error


def read_private(path: Path | str, *, insecure: bool = False) -> PrivateKey:
    """Read a private key file; errors name it, and one that others may read is warned about."""
    warn_if_exposed(path)
    try:
        return load_private(Path(path).read_bytes(), insecure=insecure)
    except PaillierError as error:
        raise PaillierError(f"{path}: {error}") from error


def write_file(path: Path | str, text: bytes, *, mode: int) -> None:
    """Write a new file that never has a wider mode, and leave none where writing fails.

    Raises:
        FileExistsError: The file exists; a key in use must not be replaced silently.
    """
    target = Path(path)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise FileExistsError(
            f"{target} exists: remove it first, or choose another name for the new key"
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        raise


def warn_if_exposed(path: Path | str) -> None:
    """Warn where a secret file may be read by others than its owner."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        warnings.warn(
            f"{path} has mode {mode:04o}, others may read it: chmod 600 {path}", stacklevel=3
        )


def public_fields(key: PublicKey) -> dict[str, str | int]:
    """Return a public key as JSON-ready fields."""
    fields: dict[str, str | int] = {"version": 1, "n": hex(key.n)}
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
    """Return one number of a key file, written as hexadecimal text or as a JSON integer."""
    value = fields.get(name)
    if isinstance(value, int):
        return value
    try:
        return int(str(value), 16)
    except ValueError as error:
        raise PaillierError(f"the key's field {name!r} is missing or not a number") from error


def encode_block(label: str, fields: dict[str, str | int]) -> bytes:
    """Return a text block named ``label`` that carries ``fields``."""
    body = base64.b64encode(json.dumps(fields, sort_keys=True).encode()).decode()
    lines = "\n".join(textwrap.wrap(body, 64))
    name = f"BRACT PAILLIER {label}"
    return f"-----BEGIN {name}-----\n{lines}\n-----END {name}-----\n".encode()


def decode_block(label: str, text: bytes) -> dict[str, object]:
    """Return the fields of a text block.

    Raises:
        PaillierError: No such block, another kind of block, or a damaged body.
    """
    match = _BLOCK.fullmatch(text.decode("ascii", errors="replace"))
    if match is None:
        raise PaillierError(f"expected a BRACT PAILLIER {label} block, found none or a cut one")
    if match[1] != label:
        raise PaillierError(f"expected a BRACT PAILLIER {label} block, found {match[1]}")
    try:
        fields = json.loads(base64.b64decode("".join(match[2].split()), validate=True))
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PaillierError(f"the body of the {label} block is damaged: {error}") from error
    if not isinstance(fields, dict) or fields.get("version") != 1:
        raise PaillierError(f"the {label} block is not of version 1: made by a newer bract?")
    return fields
