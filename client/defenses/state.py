"""Storage of a client's private state of defenses between messages and restarts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bract.defenses.base import DefenseError
from bract.disk.permissions import make_private_folder
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, one_line
from bract.updates.update import Tensors

RECORD = "bract.defense-state"
"""Name of the record in Flower's client-side ``context.state``."""


class DefenseState:
    """One client's private tensors of one federation.

    With a directory they live in one safetensors file there, written whole under a temporary name
    with mode 0600 and then renamed; they survive a restart of the SuperNode and stay out of
    Flower's context, which travels as one message between the client's own processes. Without a
    directory they live in the context, which the SuperNode holds in memory.

    Parameters
    ----------
    record
        ``context.state`` of the running message.
    directory
        The client's own folder, or None.
    key
        Name of the client and the federation, which names the file.
    name
        Name of the record in the context.
    """

    def __init__(
        self, record: RecordDict, *, directory: Path | None, key: str, name: str = RECORD
    ) -> None:
        self._record = record
        self._name = name
        self._directory = directory
        self.path = directory / f"{_safe(key)}.safetensors" if directory else None

    def load(self) -> Tensors:
        """Return the tensors by name; empty at first.

        Raises
        ------
        DefenseError
            If the file cannot be read, or others may read it.
        """
        if self.path is None:
            stored = self._record.get(self._name)
            return dict(stored.to_torch_state_dict()) if isinstance(stored, ArrayRecord) else {}
        try:
            mode = self.path.stat().st_mode & 0o777
            if mode & 0o077:
                raise DefenseError(
                    f"{self.path}: other users may read this client's secrets (mode {mode:o}); "
                    f"run `chmod 600 {self.path}`",
                    code="file-exposed",
                )
            return dict(load(self.path.read_bytes()))
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError) as error:
            raise DefenseError(
                f"{self.path}: the defenses' state cannot be read ({one_line(error, 200)}); "
                "without it the client would start with fresh moments and keys. Restore the file "
                "or remove it",
                code="file-damaged",
            ) from error

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors for the next message."""
        held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        if self.path is None or self._directory is None:
            if held:
                self._record[self._name] = ArrayRecord(held)
            elif self._name in self._record:
                del self._record[self._name]
            return
        try:
            make_private_folder(self._directory, private=True)
            write_tensors(self.path, held, private=True)
        except (OSError, BractError) as error:
            raise DefenseError(
                f"{self.path}: the defenses' state cannot be written ({one_line(error, 200)}); "
                "set state-dir in the node config to a folder this client may write",
                code="file-unwritable",
            ) from error


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
