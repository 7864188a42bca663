"""How many aggregates under a key decrypted to no values of their layout, kept with the key.

Each such answer reveals to a server that alters ciphertexts something of a value inside. The count
belongs to the key, not to a run or a federation, whose names the server chooses.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, Field

from bract.client.private import ContextTexts
from bract.disk import LockedRecord
from bract.errors import BractError
from bract.protocol.ciphertexts import EncryptedUpdate

MOST_FAILED = 3
"""Different aggregates under one key that may fail before it decrypts nothing more."""

RECORD = "bract.failed-aggregates"
"""Name of the record in Flower's client-side ``context.state``, where there is no folder."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Failed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    failed: list[_Digest] = Field(default_factory=list)


class FailedAggregates:
    """The failed aggregates of one key at this site, over all runs, clients and restarts.

    The same aggregate again reveals nothing new and is not counted again: clients of one machine
    that share a key file share this record, and all of them are sent each aggregate.

    Parameters
    ----------
    key_id
        Identity of the key.
    folder
        Where the record is kept, as ``failed-<key id>.json``, mode 0600; None keeps it in
        ``record``, the ``context.state`` of the message.
    """

    def __init__(self, key_id: str, folder: Path | None, record: RecordDict) -> None:
        self._key_id = key_id
        self._record = LockedRecord(
            _Failed,
            None if folder is None else folder / f"failed-{key_id}.json",
            ContextTexts(record, RECORD),
            key_id,
            what="the record of failed aggregates",
            fix="restore it, or deal another key",
        )

    def check(self) -> None:
        """Refuse the key where too many aggregates failed under it.

        To be asked before a decryption, and before anything of it is used: others may have failed
        meanwhile, in whatever process.
        """
        self._refuse(self._record.load())

    def count(self, update: EncryptedUpdate) -> None:
        """Count an aggregate that failed, before the server learns of it."""
        with self._record.changing() as found:
            self._refuse(found)
            digest = _digest(update)
            if digest not in found.failed:
                found.failed.append(digest)

    def _refuse(self, found: _Failed) -> None:
        if len(found.failed) >= MOST_FAILED:
            raise BractError(
                f"decrypts nothing more under key {self._key_id}: {len(found.failed)} aggregates "
                "gave no values of their run's layout; read this client's log, then deal another "
                "key",
                code="decryption-refused",
            )


def record_folder(*secrets: Path | None, state_dir: Path | None) -> Path | None:
    """Return where the record of a key belongs: with the first secret file, else in ``state_dir``.

    A file's folder that this client may not write, as one mounted read-only, is passed over.

    Raises
    ------
    BractError
        If there is a secret file, but no folder to write into: a restart would forget the record.
    """
    files = [path.resolve() for path in secrets if path is not None]
    for file in files:
        if os.access(file.parent, os.W_OK):
            return file.parent
    if files and state_dir is None:
        raise BractError(
            f"{files[0].parent}: this client may not write here, where it counts the aggregates "
            "that fail under its key; set state-dir in the node config",
            code="file-unwritable",
        )
    return state_dir


def _digest(update: EncryptedUpdate) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(update.to_tensors().items()):
        data = tensor.numpy().tobytes()
        found.update(f"{name}:{len(data)}:".encode() + data)
    return found.hexdigest()
