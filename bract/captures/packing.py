"""Updates compressed by zstd, and read back within a limit that is known before.

pyarrow, which Flower's data sets rest on, brings zstd.
"""

from __future__ import annotations

import mmap

from bract.disk.files import readable_size
from bract.errors import BractError, one_line

SUFFIX = ".zst"

LEAST_SAVED = 0.05
"""Share of a file that compression must save: below, it stays as it is."""

_LEVEL = 3


def most_bytes(parameters: int) -> int:
    """Return the most bytes that an update may unpack to: two for each of what was sent, and 1 MiB.

    Parameters
    ----------
    parameters
        Bytes of the file with the parameters that were sent, as stored on disk.
    """
    return 2 * parameters + 2**20


def packed(content: bytes | mmap.mmap) -> bytes | None:
    """Return a file compressed; None where that does not pay."""
    import pyarrow

    found = pyarrow.Codec("zstd", compression_level=_LEVEL).compress(content, asbytes=True)
    return bytes(found) if len(found) <= (1 - LEAST_SAVED) * len(content) else None


def unpacked(content: bytes, size: int, most: int) -> bytes:
    """Return a compressed file's content.

    Parameters
    ----------
    size
        Bytes that it declares.
    most
        Most bytes that it may have; nothing is unpacked that declares more, nor beyond ``size``.
    """
    import pyarrow

    if size > most:
        raise BractError(
            f"its update claims to unpack to {readable_size(size)}, and what was sent allows "
            f"{readable_size(most)}",
            code="message-malformed",
        )
    try:
        return bytes(pyarrow.Codec("zstd").decompress(content, size, asbytes=True))
    except (OSError, ValueError, OverflowError) as error:
        raise BractError(
            f"its update cannot be unpacked: {one_line(error, 100)}", code="message-malformed"
        ) from None
