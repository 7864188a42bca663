"""What an honest-but-curious server holds about one client in one round, and its store on disk."""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bract.errors import BractError, SchemaError
from bract.update import Tensors

SCHEMA_VERSION = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Protocol:
    """What the protocol declares about a client's computation; the server knows all of it.

    Attacks on running deployments usually fail because one of these was not recorded. A value
    that nobody declared is ``None``; an attack that needs it says so.

    Attributes
    ----------
    algorithm
        ``fedsgd``: the update is the gradient of one batch. ``fedavg``: it is
        ``w_global - w_local`` after ``local_steps`` steps.
    model
        Name of the registry or ``package.module:callable``, and the activation.
    image_shape
        ``(C, H, W)`` of one input.
    classes
        Number of classes ``C``.
    mean, std
        Per-channel normalisation: the model saw ``(x - mean) / std`` for pixels x in [0, 1].
    loss, optimizer, lr, momentum
        The client's objective and optimizer.
    local_steps, batch_size, num_examples
        Steps taken this round, examples a step, and distinct examples used.
    norm_mode
        ``train``: batch normalisation used the batch's statistics; ``eval``: the running ones.
    defenses
        Name and public hyper-parameters of each defense, in the order they were applied.
    encryption
        ``none`` or the scheme under which the update was sent.
    """

    algorithm: Literal["fedsgd", "fedavg"] = "fedavg"
    model: str | None = None
    activation: str = "sigmoid"
    image_shape: tuple[int, int, int] | None = None
    classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.0
    local_steps: int | None = None
    batch_size: int | None = None
    num_examples: int | None = None
    norm_mode: Literal["train", "eval"] = "train"
    defenses: tuple[dict[str, Any], ...] = ()
    encryption: str = "none"

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Protocol:
        """Rebuild from JSON, refusing keys that this version does not know."""
        known = {f.name for f in fields(cls)}
        strange = sorted(set(content) - known)
        if strange:
            raise BractError(f"protocol has unknown keys {', '.join(strange)}")
        tuples = {
            key: tuple(content[key])
            for key in ("image_shape", "mean", "std", "defenses")
            if content.get(key) is not None
        }
        return cls(**{**content, **tuples})

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    def updated(self, declared: dict[str, Any]) -> Protocol:
        """Return a copy in which what ``declared`` holds takes precedence."""
        return Protocol.from_dict({**self.to_dict(), **declared})


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
        What came back, as an update (see `bract.update`); empty where it was encrypted.
    returned_buffers
        Buffers after local training, where the client sent them.
    ciphertexts
        Encrypted payload by name, ``uint8`` tensors; empty where nothing was encrypted.
    protocol
        What the protocol declares.
    provenance
        Flower run and node ids, reply metrics, time of arrival in seconds since the epoch.
    """

    round: int
    client: str
    parameters: Tensors
    update: Tensors
    protocol: Protocol
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
        p = self.protocol
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
                f"{self.key}: the update is encrypted ({self.protocol.encryption}); "
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

_TENSOR_GROUPS = ("parameters", "buffers", "update", "returned_buffers", "ciphertexts")


class ObservationStore:
    """Observations on disk: one folder a round and client.

    ``round-0001/client-0/`` holds ``observation.json`` and one safetensors file for each group of
    tensors. A folder is written under a temporary name and renamed, so a reader sees whole
    observations only.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def save(self, observation: Observation) -> Path:
        """Write one observation, replacing an earlier one of the same round and client."""
        final = self.root / f"round-{observation.round:04d}" / _safe(observation.client)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.parent / f".{final.name}.{uuid.uuid4().hex}.tmp"
        temporary.mkdir()
        try:
            for group in _TENSOR_GROUPS:
                tensors: Tensors = getattr(observation, group)
                if tensors:
                    save_file(
                        {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
                        temporary / f"{group}.safetensors",
                    )
            description = {
                "schema": SCHEMA_VERSION,
                "round": observation.round,
                "client": observation.client,
                "protocol": observation.protocol.to_dict(),
                "provenance": observation.provenance,
                "order": {g: list(getattr(observation, g)) for g in _TENSOR_GROUPS},
            }
            (temporary / "observation.json").write_text(json.dumps(description, indent=1))
            if final.exists():
                shutil.rmtree(final)
            temporary.replace(final)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise BractError(f"{final}: cannot be written: {error}") from error
        return final

    def load(self, folder: Path) -> Observation:
        """Read one observation.

        Raises
        ------
        BractError
            If the folder is half-written or corrupted; `SchemaError` for another schema version.
        """
        description = self.describe(folder)
        try:
            groups: dict[str, Tensors] = {}
            for group in _TENSOR_GROUPS:
                names = description["order"][group]
                tensors = load_file(folder / f"{group}.safetensors") if names else {}
                groups[group] = {name: tensors[name] for name in names}
            return Observation(
                round=int(description["round"]),
                client=str(description["client"]),
                protocol=Protocol.from_dict(description["protocol"]),
                provenance=dict(description["provenance"]),
                **groups,
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture ({type(error).__name__}: {error})"
            ) from error

    def describe(self, folder: Path) -> dict[str, Any]:
        """Read what is known of one observation without its tensors.

        Raises
        ------
        BractError
            As `load` does.
        """
        try:
            description: dict[str, Any] = json.loads((folder / "observation.json").read_text())
            found = description["schema"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise BractError(
                f"{folder}: half-written or corrupted capture ({type(error).__name__}: {error})"
            ) from error
        if found != SCHEMA_VERSION:
            raise SchemaError(
                f"{folder}: observation schema {found}, this version reads {SCHEMA_VERSION}; "
                "capture it again or use the bract version that wrote it"
            )
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


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
