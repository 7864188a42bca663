"""Arrays of messages that wait on disk instead of in memory, until they are read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray


class SpooledArray(Array):
    """Array backed by an unlinked temporary file.

    Attributes
    ----------
    content
        The serialised bytes, ``uint8``, mapped into memory copy-on-write.
    """

    content: NDArray[np.uint8]

    def __init__(self, array: Array, folder: Path) -> None:
        """Write ``array`` to a file in ``folder``; OSError where that fails."""
        self.dtype, self.shape, self.stype = array.dtype, array.shape, array.stype
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(array.data)
            file.flush()
            self.content = np.memmap(file, dtype=np.uint8, mode="c")

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The serialised bytes, read anew each time."""
        return self.content.tobytes()
