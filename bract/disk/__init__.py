"""Keep files on the disk of a party: whole, private, changed under a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.disk.files import (
        append_line,
        readable_size,
        refuse_devices,
        replacing,
        utf8,
        write_bytes,
        write_failed,
        write_pieces,
        write_text,
    )
    from bract.disk.locks import LockedError, alone, holder, lock, reading
    from bract.disk.named import check_file, open_named, read_named
    from bract.disk.permissions import GROUP, UMASK, make_private_folder, open_private, warn_if_open
    from bract.disk.private import locked, read_private
    from bract.disk.record import LockedRecord, Memory, parse_record
    from bract.disk.tensor_files import tensors_as_bytes, tensors_on_disk, write_tensors

__all__ = [
    "GROUP",
    "UMASK",
    "LockedError",
    "LockedRecord",
    "Memory",
    "alone",
    "append_line",
    "check_file",
    "holder",
    "lock",
    "locked",
    "make_private_folder",
    "open_named",
    "open_private",
    "parse_record",
    "read_named",
    "read_private",
    "readable_size",
    "reading",
    "refuse_devices",
    "replacing",
    "tensors_as_bytes",
    "tensors_on_disk",
    "utf8",
    "warn_if_open",
    "write_bytes",
    "write_failed",
    "write_pieces",
    "write_tensors",
    "write_text",
]

_PLACES = {
    "GROUP": "bract.disk.permissions",
    "LockedError": "bract.disk.locks",
    "LockedRecord": "bract.disk.record",
    "Memory": "bract.disk.record",
    "UMASK": "bract.disk.permissions",
    "alone": "bract.disk.locks",
    "append_line": "bract.disk.files",
    "check_file": "bract.disk.named",
    "holder": "bract.disk.locks",
    "lock": "bract.disk.locks",
    "locked": "bract.disk.private",
    "make_private_folder": "bract.disk.permissions",
    "open_named": "bract.disk.named",
    "open_private": "bract.disk.permissions",
    "parse_record": "bract.disk.record",
    "read_named": "bract.disk.named",
    "read_private": "bract.disk.private",
    "readable_size": "bract.disk.files",
    "reading": "bract.disk.locks",
    "refuse_devices": "bract.disk.files",
    "replacing": "bract.disk.files",
    "tensors_as_bytes": "bract.disk.tensor_files",
    "tensors_on_disk": "bract.disk.tensor_files",
    "utf8": "bract.disk.files",
    "warn_if_open": "bract.disk.permissions",
    "write_bytes": "bract.disk.files",
    "write_failed": "bract.disk.files",
    "write_pieces": "bract.disk.files",
    "write_tensors": "bract.disk.tensor_files",
    "write_text": "bract.disk.files",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
