"""An honest-but-curious server's knowledge of one client in one round, and its store on disk."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from bract.captures.captured import READERS, SENT, CaptureRecords, captures_in_round
from bract.captures.packing import SUFFIX, most_bytes, unpacked
from bract.captures.storing import GROUPS, UPDATE, encode, sent_file, used_within
from bract.config.capture import Compression
from bract.disk.files import append_line, readable_size, replacing, write_bytes
from bract.disk.locks import alone
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, SchemaError, one_line
from bract.schema.capture import REMOVED, Group, ObservationFile, RemovedRound, Rounding
from bract.schema.declaration import ClientDeclaration
from bract.updates.rounding import widened
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors

__all__ = ["ClientDeclaration", "Observation", "ObservationStore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """Exactly what the server holds about one client in one round.

    Attributes
    ----------
    round, client
        Round from 1, and the client's name (or ``node-<id>`` where it gave none).
    parameters, buffers
        The tensors that the server sent: trainable ones and buffers, by name.
    update
        The reply's update (see `bract.updates.update`); empty where it was encrypted.
    returned_buffers
        Buffers after local training, where the client sent them.
    ciphertexts
        Encrypted payload by name, ``uint8`` tensors; empty where nothing was encrypted.
    protocol
        The protocol's declaration.
    provenance
        The content of `bract.schema.Provenance`: Flower run and node ids, reply metrics, time of
        arrival, and which of the client's claims were not taken.
    rounded
        How the update was rounded to be stored; None where it is as it came.
    computed
        Whether the update is a difference of float32 models, whose rounding covers exact zeros.
    """

    round: int
    client: str
    parameters: Tensors
    update: Tensors
    declaration: ClientDeclaration
    buffers: Tensors = field(default_factory=dict)
    returned_buffers: Tensors = field(default_factory=dict)
    ciphertexts: Tensors = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    rounded: Rounding | None = None
    computed: bool = False

    @property
    def key(self) -> str:
        """A name that is unique within a run: ``round-0001/client-0``."""
        return f"round-{self.round:04d}/{self.client}"

    @property
    def law(self) -> StepLaw:
        """Return how the update follows from the gradients of the client's steps."""
        return StepLaw.of(self.declaration)

    def gradient(self) -> Tensors:
        """Return the update scaled to a gradient.

        For ``fedsgd`` it is the update itself. For ``fedavg`` by plain SGD it is
        ``update / (lr * local_steps)``: exact for one step, the mean over the trajectory for more.
        Without a declared learning rate or number of steps the update is returned unscaled. What
        weight decay adds to an undefended update (`StepLaw.decayed` times the parameters that were
        sent) is taken away, but for frozen parameters, whose update is zero.
        """
        law = self.law
        if not law.averaging or not law.scaled:
            return dict(self.update)
        scale, share = law.to_gradient, law.decayed
        found = {name: value * scale for name, value in self.update.items()}
        if share:
            # What decays moves: a tensor that did not is frozen.
            found = {
                name: value - share * self.parameters[name]
                if name in self.parameters and bool(value.any())
                else value
                for name, value in found.items()
            }
        return found

    def check(self) -> None:
        """Refuse what no attack can use.

        Raises
        ------
        BractError
            If nothing plain was returned, the momentum is not in [0, 1), tensors are missing,
            shapes differ, or a value that was sent, or one of the update, is not finite. Returned
            buffers that are not are left out by who reads them.
        """
        if self.ciphertexts and not self.update:
            raise BractError(
                f"{self.key}: the update is encrypted ({self.declaration.encryption}); "
                "no gradient attack applies",
                code="capture-encrypted",
            )
        if not 0.0 <= self.declaration.momentum < 1.0:
            raise BractError(
                f"{self.key}: declaration.momentum is {self.declaration.momentum:g}, expected 0 or "
                "more and below 1; correct the capture's declaration",
                code="declaration-wrong",
            )
        missing = sorted(set(self.parameters) - set(self.update))
        if missing:
            raise BractError(
                f"{self.key}: the update lacks {', '.join(missing[:5])}", code="capture-lacks"
            )
        for name, value in self.update.items():
            if name in self.parameters and value.shape != self.parameters[name].shape:
                raise BractError(
                    f"{self.key}: {name} was returned as {tuple(value.shape)}, "
                    f"sent as {tuple(self.parameters[name].shape)}",
                    code="capture-damaged",
                )
        for group, where in _FINITE.items():
            tensors: Tensors = getattr(self, group)
            for name, value in tensors.items():
                if value.is_floating_point() and not bool(value.isfinite().all()):
                    raise BractError(
                        f"{self.key}: {name} holds NaN or infinite values {where}",
                        code="attack-evidence",
                    )

    def to(self, device: torch.device | str) -> Observation:
        """Return a copy with every tensor on ``device``."""

        def move(tensors: Tensors) -> Tensors:
            return {name: value.to(device) for name, value in tensors.items()}

        return replace(
            self,
            parameters=move(self.parameters),
            update=move(self.update),
            buffers=move(self.buffers),
            returned_buffers=move(self.returned_buffers),
        )


_FINITE = {
    "parameters": (
        "as the server sent it; the global model has diverged: choose an earlier round, or train "
        "with a lower learning rate"
    ),
    "buffers": (
        "as the server sent it; the global model has diverged: choose an earlier round, or train "
        "with a lower learning rate"
    ),
    "update": "in the update; the client's training diverged: choose another round",
}
"""What must be finite, and the message and effect if it is not."""


class ObservationStore(CaptureRecords):
    """Observations on disk: one folder a round and client.

    ``round-0001/client-0/`` holds ``observation.json`` and one safetensors file for each group of
    tensors of the reply; what was sent is stored once a round in ``round-0001/.sent/``, under the
    SHA-256 of its content. A folder is written under a temporary name and renamed, so a reader sees
    whole observations only.

    Files may come from a third party: nothing in them is executed, and a model that is
    ``package.module:callable`` is None in the result of `load` unless the reader named it.

    Parameters
    ----------
    models
        References ``package.module:callable`` that the reader trusts. Whatever attacks the
        observations imports and calls them.
    """

    def __init__(
        self, root: Path | str, *, models: Collection[str] = (), quota: int | None = None
    ) -> None:
        super().__init__(root)
        self.models = frozenset(models)
        self.quota = quota
        self.compression: Compression = "none"
        self._used: int | None = None

    @property
    def place(self) -> str:
        """The folder, as an absolute path."""
        return str(self.root.absolute())

    def save(self, observation: Observation) -> Path:
        """Write one observation, replacing an earlier one of the same round and client.

        Raises
        ------
        BractError
            If the client's name is no safe name of a folder, or the disk does not take it: the
            message gives the size needed and the size free, and nothing half-written stays.
            `RoundLostError` where ``quota`` is reached.
        """
        encoded = encode(observation, self.compression, spool=self.root)
        final = self.folder(observation.round, observation.client)
        shared = {final.parent / SENT / name: held for name, held in encoded.sent.items()}
        missing = {p: held for p, held in shared.items() if _size_of(p) != len(held)}
        size = encoded.size + sum(map(len, missing.values()))
        earlier = _size_below(final)
        self._used = used_within(self.quota, self._used, size - earlier, self._count)
        _check_room(final, size)
        with replacing(final, size=size) as temporary:
            make_private_folder(temporary)
            for name, content in encoded.own.items():
                write_bytes(temporary / name, content)
            # A reader finds what was sent before the capture that refers to it.
            for path, content in missing.items():
                write_bytes(path, content)
        if self._used is not None:
            self._used += size - earlier
        return final

    def _count(self) -> int:
        return sum(_size_below(folder) for _, folder in self.rounds())

    def note(self, name: str, line: str) -> None:
        """Append one line to a file in the folder of the rounds."""
        append_line(self.root / name, line)

    def retire(self, keep: int, before: int) -> list[RemovedRound]:
        """Remove captured rounds, whole, and list them in ``removed.jsonl``.

        The files that a round's captures share are in its folder and go with it; no other round has
        references to it. While a process is `reading` nothing is removed.

        Parameters
        ----------
        keep, before
            Rounds before the round ``before`` go, but for the last ``keep`` of them.
        """
        for left in self.root.glob(".round-*.tmp"):  # by a process that was killed meanwhile
            shutil.rmtree(left, ignore_errors=True)
        earlier = [(number, folder) for number, folder in self.rounds() if number < before]
        due = earlier[: max(0, len(earlier) - keep)]
        if not due:
            return []
        with alone(self.root / READERS) as unread:
            removed = [self._remove(n, folder) for n, folder in due] if unread else []
        if not unread:
            _log.warning(
                "%s: %d rounds stay beyond capture.keep_rounds while they are being read",
                self.root,
                len(due),
            )
        return removed

    def _remove(self, number: int, folder: Path) -> RemovedRound:
        gone = RemovedRound(
            round=number,
            captures=len(captures_in_round(folder)),
            size=_size_below(folder),
            time=time.time(),
        )
        # No reader sees half a round: under this name it is none.
        hidden = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        try:
            self.note(REMOVED, gone.model_dump_json(by_alias=True))
            folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise BractError(
                f"{folder}: cannot be removed: {one_line(error, 200)}", code="file-unwritable"
            ) from error
        if self._used is not None:
            self._used -= gone.size
        return gone

    def load(self, folder: Path) -> Observation:
        """Read one observation.

        Raises
        ------
        BractError
            If the folder is half-written, corrupted or not where it belongs; `SchemaError` for
            another schema version.
        """
        description = self.describe(folder)
        try:
            groups: dict[str, Tensors] = {}
            for group in GROUPS:
                names = description.tensors.get(group, ())
                tensors = _tensors(folder, description, group) if names else {}
                groups[group] = {name: tensors[name] for name in names}
            groups["update"] = widened(groups["update"], description.rounded)
        except BractError as error:
            raise BractError(f"{folder}: {error}", code=error.code) from None
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture "
                f"({type(error).__name__}: {one_line(error, 200)})",
                code="capture-damaged",
            ) from error
        declaration = description.declaration
        if declaration.imports and declaration.model not in self.models:
            declaration = replace(declaration, model=None)
        declaration = declaration.trusting(self.models)
        return Observation(
            round=description.round,
            client=description.client,
            declaration=declaration,
            provenance=description.provenance.model_dump(),
            rounded=description.rounded,
            computed=False,
            **groups,
        )

    def __iter__(self) -> Iterator[Observation]:
        """Yield every readable observation; warn about the others by name and go on."""
        for folder in self.folders():
            try:
                yield self.load(folder)
            except SchemaError:
                raise
            except BractError as error:
                _log.warning("skipped: %s", error)


def _tensors(folder: Path, description: ObservationFile, group: Group) -> Tensors:
    """Read a group of tensors; a shared file is held against its digest."""
    if group == "parameters" or group == "buffers":
        return load_file(sent_file(folder.parent, description.sent[group]))
    if group != "update" or description.packed is None:
        return load_file(folder / f"{group}.safetensors")
    path, sent = folder / (UPDATE + SUFFIX), description.sent.get("parameters")
    most = most_bytes(0 if sent is None else sent_file(folder.parent, sent).stat().st_size)
    if path.stat().st_size > most:
        raise BractError(
            f"{path.name} is larger than what was sent allows ({readable_size(most)})",
            code="capture-damaged",
        )
    return load(unpacked(path.read_bytes(), description.packed, most))


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _size_below(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(_size_of(path) or 0 for path in folder.rglob("*") if path.is_file())


def _check_room(path: Path, size: int) -> None:
    """Refuse to fill the last of a disk, which the rest of the server needs too."""
    folder = next((p for p in path.parents if p.is_dir()), None)
    free = size if folder is None else shutil.disk_usage(folder).free
    if free < size:
        raise BractError(
            f"{path}: cannot be written: no space left "
            f"({readable_size(size)} needed, {readable_size(free)} free)",
            code="file-unwritable",
        )
