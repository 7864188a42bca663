"""What a server of an encrypted run keeps: the public initial model, and every aggregate."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from flwr.app import ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bract.errors import BractError
from bract.records import from_arrays, to_arrays


class Ledger:
    """The aggregates of one run, by round, from 1.

    A client that missed rounds, joined late or lost its model is sent the initial model and every
    aggregate since, and so ends where the others are. With a folder the ledger outlives the server
    and grows on disk, by one aggregate a round; without one it is kept in memory.

    Parameters
    ----------
    folder
        Where to keep it; an existing ledger there is continued.

    Attributes
    ----------
    session
        Identity of the run, bound into every sealed box.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._records: dict[int, ArrayRecord] = {}
        self._initial: ArrayRecord | None = None
        self._last = 0
        self.session = uuid.uuid4().hex
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        description = folder / "ledger.json"
        try:
            if description.is_file():
                content = json.loads(description.read_text())
                self.session = str(content["session"])
                stored = load_file(folder / "initial.safetensors")
                self._initial = to_arrays({name: stored[name] for name in content["order"]})
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise BractError(
                f"{folder}: the aggregates of the earlier run cannot be read ({error}); "
                "restore the folder, or start a new run"
            ) from error
        while self._path(self._last + 1).is_file():
            self._last += 1

    @property
    def last(self) -> int:
        """Number of the last round that was aggregated; 0 before the first."""
        return self._last

    @property
    def initial(self) -> ArrayRecord:
        """The plain initial model, which is public."""
        assert self._initial is not None, "the ledger has not begun"
        return self._initial

    def begin(self, initial: ArrayRecord) -> None:
        """Take the initial model, unless the ledger has one."""
        if self._initial is not None:
            return
        self._initial = initial
        if self._folder is not None:
            tensors = from_arrays(initial)
            save_file(tensors, self._folder / "initial.safetensors")
            # Safetensors sorts names; the order of a state dict is part of the model.
            text = json.dumps({"session": self.session, "order": list(tensors)})
            temporary = self._folder / ".ledger.json.tmp"
            temporary.write_text(text)
            temporary.replace(self._folder / "ledger.json")

    def append(self, aggregate: ArrayRecord) -> None:
        """Keep the aggregate of the next round."""
        self._last += 1
        if self._folder is None:
            self._records[self._last] = aggregate
            return
        temporary = self._folder / ".aggregate.tmp"
        save_file(from_arrays(aggregate), temporary)
        temporary.replace(self._path(self._last))
        self._records = {self._last: aggregate}

    def aggregate(self, number: int) -> ArrayRecord:
        """Return one round's aggregate."""
        if number not in self._records:
            return to_arrays(load_file(self._path(number)))
        return self._records[number]

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round-{number:04d}.safetensors"
