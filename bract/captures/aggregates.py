"""Storage of a server of an encrypted run: the public initial model, and every aggregate."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from bract.disk.files import write_bytes, write_text
from bract.disk.permissions import make_private_folder
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, one_line
from bract.parse.strict_json import parse_json
from bract.updates.update import Tensors

_KEY_FILE = "public.pem"
_MOST_DESCRIPTION = 1 << 24


class Aggregates:
    """The aggregates of one run, by round, from 1.

    A client that missed rounds, joined late or lost its model is sent the initial model and every
    aggregate since, and so ends where the others are. With a folder they outlive the server
    and grow on disk, by one aggregate a round; without one they are kept in memory.

    Parameters
    ----------
    folder
        Where to keep it; those that are there are continued.

    Attributes
    ----------
    session
        Drawn for the run, and kept where it is resumed.
    runs
        Flower's ids of the run, of which it has another each time it is resumed, in order.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._records: dict[int, Tensors] = {}
        self._initial: Tensors | None = None
        self._last = 0
        self._key = b""
        self.session = uuid.uuid4().hex
        self.runs: tuple[str, ...] = ()
        if folder is None:
            return
        make_private_folder(folder)
        description = folder / "aggregates.json"
        try:
            if description.is_file():
                content = parse_json(description.read_bytes(), most=_MOST_DESCRIPTION)
                self.session = str(content["session"])
                self.runs = tuple(map(str, content.get("runs", ())))
                stored = load_file(folder / "initial.safetensors")
                self._initial = {name: stored[name] for name in content["order"]}
                if (folder / _KEY_FILE).is_file():
                    self._key = (folder / _KEY_FILE).read_bytes()
        except (BractError, LookupError, OSError, TypeError, ValueError, SafetensorError) as error:
            raise BractError(
                f"{folder}: the aggregates of the earlier run cannot be read "
                f"({one_line(error, 200)}); restore the folder, or start a new run",
                code="file-unreadable",
            ) from error
        while self.path(self._last + 1).is_file():
            self._last += 1

    @property
    def last(self) -> int:
        """Number of the last round that was aggregated; 0 before the first."""
        return self._last

    @property
    def initial(self) -> Tensors:
        """The plain initial model, which is public."""
        assert self._initial is not None, "no initial model was given yet"
        return self._initial

    def begin(self, initial: Tensors) -> None:
        """Take the initial model, unless there is one."""
        if self._initial is not None:
            return
        self._initial = initial
        if self._folder is not None:
            write_tensors(self._folder / "initial.safetensors", initial)
            self._describe()

    def enter(self, run_id: int) -> tuple[str, ...]:
        """Note Flower's id of the run that goes on here; return those before it."""
        name = str(run_id)
        if name not in self.runs:
            self.runs = (*self.runs, name)
            self._describe()
        return self.runs[: self.runs.index(name)]

    def _describe(self) -> None:
        if self._folder is None:
            return
        # Safetensors sorts names; the order of a state dict is part of the model.
        about = {"session": self.session, "runs": self.runs, "order": list(self.initial)}
        write_text(self._folder / "aggregates.json", json.dumps(about))

    @property
    def key(self) -> bytes:
        """Text of the run's public key; empty before there is one."""
        return self._key

    @key.setter
    def key(self, text: bytes) -> None:
        self._key = text
        if self._folder is not None:
            write_bytes(self._folder / _KEY_FILE, text)

    def append(self, aggregate: Tensors) -> None:
        """Keep the aggregate of the next round."""
        self._last += 1
        if self._folder is None:
            self._records[self._last] = aggregate
            return
        write_tensors(self.path(self._last), aggregate)
        self._records = {self._last: aggregate}

    def put(self, number: int, aggregate: Tensors) -> None:
        """Keep one round's aggregate, in place of an earlier one of that round."""
        if self._folder is None:
            self._records[number] = aggregate
        else:
            write_tensors(self.path(number), aggregate)
        self._last = max(self._last, number)

    def aggregate(self, number: int) -> Tensors:
        """Return one round's aggregate."""
        if number not in self._records:
            return load_file(self.path(number))
        return self._records[number]

    def path(self, number: int) -> Path:
        """Return where a round's aggregate is, in a run that has a folder of them."""
        assert self._folder is not None
        return self._folder / f"round-{number:04d}.safetensors"


def masked_name(number: int) -> str:
    """Name of the file in which a client that keeps truth keeps its own share of a round's sum."""
    return f"masked-{number:04d}.safetensors"
