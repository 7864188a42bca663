"""Write tensors whole, as safetensors files; `bract.disk.files` imports no torch."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save, save_file
from torch import Tensor

from bract.disk.files import replacing
from bract.disk.permissions import make_private_folder, open_private

LARGE = 1 << 26
"""Bytes of tensors from which on they are written to a file rather than held in memory again."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    private: bool = False,
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write tensors, of any device, as one safetensors file, as `write_bytes` does.

    ``about`` is text by name that the file holds besides.
    """
    size = sum(value.nbytes for value in tensors.values())
    with replacing(path, size=size, private=private) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = open_private(temporary, flags, private=private)
        try:
            # Into the file that is there, from the tensors' own memory.
            save_file(_held(tensors), temporary, dict(about) if about else None)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return path


def tensors_as_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors, of any device, as one safetensors file; the same tensors give the same."""
    return save(_held(tensors))


def tensors_on_disk(tensors: Mapping[str, Tensor], folder: Path) -> bytes | mmap.mmap:
    """Return what `tensors_as_bytes` does; large tensors as a file without a name in ``folder``.

    Raises
    ------
    WriteFailedError
        If the file cannot be written.
    """
    size = sum(value.nbytes for value in tensors.values())
    if size < LARGE:
        return tensors_as_bytes(tensors)
    make_private_folder(folder)
    place = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        write_tensors(place, tensors)
        with place.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    finally:
        place.unlink(missing_ok=True)


def _held(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
