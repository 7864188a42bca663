"""What an honest-but-curious server holds about one client in one round, and its store on disk.

Longer than most modules: the store stands beside what it stores.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from bract.errors import BractError, SchemaError, one_line
from bract.files import readable_size, replacing, write_tensors, write_text
from bract.names import check_name
from bract.protocol.update import Tensors
from bract.schema.capture import (
    OBSERVATION_SCHEMA,
    ClientDeclaration,
    Group,
    ObservationFile,
    Provenance,
    first_problem,
)
from bract.strict_json import parse_json

__all__ = ["SCHEMA_VERSION", "ClientDeclaration", "Observation", "ObservationStore"]

SCHEMA_VERSION = OBSERVATION_SCHEMA

_LONGEST_DESCRIPTION = 16 * 2**20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """Exactly what the server holds about one client in one round.

    Attributes
    ----------
    round, client
        Round from 1, and the client's name (or ``node-<id>`` where it gave none).
    parameters, buffers
        What the server sent: trainable tensors and buffers, by name.
    update
        What came back, as an update (see `bract.protocol.update`); empty where it was encrypted.
    returned_buffers
        Buffers after local training, where the client sent them.
    ciphertexts
        Encrypted payload by name, ``uint8`` tensors; empty where nothing was encrypted.
    protocol
        What the protocol declares.
    provenance
        What `bract.schema.Provenance` holds: Flower run and node ids, reply metrics, time of
        arrival, and what the client said that was not taken.
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

    @property
    def key(self) -> str:
        """A name that is unique within a run: ``round-0001/client-0``."""
        return f"round-{self.round:04d}/{self.client}"

    def gradient(self) -> Tensors:
        """Return the update scaled to a gradient.

        For ``fedsgd`` it is the update itself. For ``fedavg`` by plain SGD it is
        ``update / (lr * local_steps)``: exact for one step, the mean over the trajectory for more.
        Without a declared learning rate or number of steps the update is returned unscaled.
        """
        p = self.declaration
        if p.algorithm == "fedsgd" or not p.lr or not p.local_steps:
            return dict(self.update)
        scale = 1.0 / (p.lr * p.local_steps)
        return {name: value * scale for name, value in self.update.items()}

    def check(self) -> None:
        """Refuse what no attack can use.

        Raises
        ------
        BractError
            If nothing plain came back, tensors are missing, shapes differ, or a value that was
            sent or came back is not finite.
        """
        if self.ciphertexts and not self.update:
            raise BractError(
                f"{self.key}: the update is encrypted ({self.declaration.encryption}); "
                "no gradient attack applies"
            )
        missing = sorted(set(self.parameters) - set(self.update))
        if missing:
            raise BractError(f"{self.key}: the update lacks {', '.join(missing[:5])}")
        for name, value in self.update.items():
            if name in self.parameters and value.shape != self.parameters[name].shape:
                raise BractError(
                    f"{self.key}: {name} came back as {tuple(value.shape)}, "
                    f"sent as {tuple(self.parameters[name].shape)}"
                )
        for group, where in _FINITE.items():
            tensors: Tensors = getattr(self, group)
            for name, value in tensors.items():
                if value.is_floating_point() and not bool(value.isfinite().all()):
                    raise BractError(f"{self.key}: {name} holds NaN or infinite values {where}")

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
    "returned_buffers": "as it came back; the client's training diverged: choose another round",
}
"""What must be finite, and what to say and do where it is not."""

_TENSOR_GROUPS: tuple[Group, ...] = (
    "parameters",
    "buffers",
    "update",
    "returned_buffers",
    "ciphertexts",
)


class ObservationStore:
    """Observations on disk: one folder a round and client.

    ``round-0001/client-0/`` holds ``observation.json`` and one safetensors file for each group of
    tensors. A folder is written under a temporary name and renamed, so a reader sees whole
    observations only.

    What is read may come from somebody else: nothing in it is executed, and a model that is
    ``package.module:callable`` is None in what `load` returns unless the reader named it.

    Parameters
    ----------
    models
        References ``package.module:callable`` that the reader trusts. Whatever attacks the
        observations imports and calls them.
    """

    def __init__(self, root: Path | str, *, models: Collection[str] = ()) -> None:
        self.root = Path(root)
        self.models = frozenset(models)

    def save(self, observation: Observation) -> Path:
        """Write one observation, replacing an earlier one of the same round and client.

        Raises
        ------
        BractError
            If the client's name is no safe name of a folder, or the disk does not take it: the
            message says what was needed and what is free, and nothing half-written stays.
        """
        groups: dict[Group, Tensors] = {g: getattr(observation, g) for g in _TENSOR_GROUPS}
        try:
            description = ObservationFile(
                round=observation.round,
                client=observation.client,
                declaration=observation.declaration,
                provenance=Provenance(**observation.provenance),
                tensors={group: tuple(held) for group, held in groups.items()},
            ).model_dump_json(by_alias=True, indent=1)
        except ValidationError as error:
            raise BractError(
                f"{one_line(observation.key, 100)}: cannot be stored: {first_problem(error)}"
            ) from None
        final = self.folder(observation.round, observation.client)
        size = sum(v.numel() * v.element_size() for held in groups.values() for v in held.values())
        _check_room(final, size + len(description))
        with replacing(final, size=size + len(description)) as temporary:
            temporary.mkdir()
            for group, held in groups.items():
                if held:
                    write_tensors(temporary / f"{group}.safetensors", held)
            write_text(temporary / "observation.json", description)
        return final

    def folder(self, server_round: int, client: str) -> Path:
        """Return where an observation lies.

        Raises
        ------
        BractError
            If the client's name is no safe name of a folder.
        """
        return self.root / f"round-{server_round:04d}" / check_name(client)

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
            for group in _TENSOR_GROUPS:
                names = description.tensors.get(group, ())
                tensors = load_file(folder / f"{group}.safetensors") if names else {}
                groups[group] = {name: tensors[name] for name in names}
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture "
                f"({type(error).__name__}: {one_line(error, 200)})"
            ) from error
        declaration = description.declaration
        if declaration.imports and declaration.model not in self.models:
            declaration = replace(declaration, model=None)
        return Observation(
            round=description.round,
            client=description.client,
            declaration=declaration,
            provenance=description.provenance.model_dump(),
            **groups,
        )

    def describe(self, folder: Path) -> ObservationFile:
        """Read what is known of one observation without its tensors.

        Raises
        ------
        BractError
            As `load` does.
        """
        path = folder / "observation.json"
        try:
            with path.open("rb") as file:
                text = file.read(_LONGEST_DESCRIPTION + 1)
            content = parse_json(text, most=_LONGEST_DESCRIPTION)
            if not isinstance(content, dict):
                raise BractError(f"expected an object, found a {type(content).__name__}")
            found = content.get("schema")
            if found != SCHEMA_VERSION:
                raise SchemaError(
                    f"{path}: observation schema {one_line(found, 40)}, this version reads "
                    f"{SCHEMA_VERSION}; capture it again or use the bract version that wrote it"
                )
            description = ObservationFile.model_validate(content)
            expected = self.folder(description.round, description.client)
            if (expected.parent.name, expected.name) != (folder.parent.name, folder.name):
                raise BractError(f"it belongs to {expected.parent.name}/{expected.name}")
        except SchemaError:
            raise
        except ValidationError as error:
            raise BractError(f"{folder}: corrupted capture ({first_problem(error)})") from None
        except (OSError, BractError, RecursionError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture ({one_line(error, 200)})"
            ) from None
        return description

    def folders(self) -> list[Path]:
        """Return the folders of whole and broken observations, by round and client."""
        return sorted(
            folder
            for folder in self.root.glob("round-*/*")
            if folder.is_dir() and not folder.name.startswith(".")
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


def _check_room(path: Path, size: int) -> None:
    """Refuse to fill the last of a disk, which the rest of the server needs too."""
    folder = next((p for p in path.parents if p.is_dir()), None)
    free = size if folder is None else shutil.disk_usage(folder).free
    if free < size:
        raise BractError(
            f"{path}: cannot be written: no space left "
            f"({readable_size(size)} needed, {readable_size(free)} free)"
        )
