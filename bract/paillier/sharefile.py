"""Key shares of a threshold key as files."""

from pathlib import Path

from bract.paillier.errors import PaillierError
from bract.paillier.keyfile import (
    decode_block,
    encode_block,
    integer_field,
    public_fields,
    public_from_fields,
    read_secret,
    small_field,
    write_file,
)
from bract.paillier.sharing import MOST_SHARES, KeyShare


def save_share(share: KeyShare, path: Path | str) -> None:
    """Write a key share file with mode 0600; an existing file is not overwritten."""
    write_file(path, dump_share(share))


def read_share(path: Path | str, *, insecure: bool = False) -> KeyShare:
    """Read a key share file; errors name it, and one that others may read is refused."""
    text = read_secret(path)
    try:
        return load_share(text, insecure=insecure)
    except PaillierError as error:
        raise type(error)(f"{path}: {error}") from error


def dump_share(share: KeyShare) -> bytes:
    """Return the text of a key share, unencrypted."""
    numbers = {name: getattr(share, name) for name in ("index", "threshold", "total", "degree")}
    return encode_block(
        "KEY SHARE",
        {
            **public_fields(share.public),
            **numbers,
            "value": hex(share.value),
            "verification": [hex(number) for number in share.verification],
        },
    )


def load_share(text: bytes, *, insecure: bool = False) -> KeyShare:
    """Read what :func:`dump_share` wrote.

    Raises:
        PaillierError: Not a key share, damaged, or of a size that is not offered.
    """
    fields = decode_block("KEY SHARE", text)
    names = ("index", "threshold", "total", "degree")
    index, threshold, total, degree = (small_field(fields, name) for name in names)
    value = integer_field(fields, "value")
    found = fields.get("verification")
    if not isinstance(found, list) or len(found) > MOST_SHARES:
        raise PaillierError("the key's field 'verification' is missing or no list of numbers")
    verification = tuple(integer_field({"verification": v}, "verification") for v in found)
    public = public_from_fields(fields, insecure=insecure)
    return KeyShare(public, index, threshold, total, degree, value, verification)
