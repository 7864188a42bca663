"""An observation as files, wherever they go: its own, and those that a round's captures share.

What the server sent is stored once a round in ``round-NNNN/.sent/<SHA-256>.safetensors``. The
name is made from a checked digest alone, so no capture refers to anything outside of its round.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from bract.captures.captured import DESCRIPTION, SENT, sent_name
from bract.captures.packing import SUFFIX, most_bytes, packed
from bract.config.capture import Compression
from bract.config.faults import first_problem
from bract.disk.files import readable_size
from bract.disk.tensor_files import tensors_as_bytes, tensors_on_disk
from bract.errors import BractError, one_line
from bract.schema.capture import Group, ObservationFile, Provenance, RemovedRound, Rounding
from bract.schema.declaration import ClientDeclaration
from bract.updates.update import Tensors

GROUPS: tuple[Group, ...] = ("parameters", "buffers", "update", "returned_buffers", "ciphertexts")
SHARED: tuple[Group, ...] = ("parameters", "buffers")

UPDATE = "update.safetensors"


class RoundLostError(BractError):
    """No further reply of this round can be stored either."""

    code = "file-unwritable"


class CaptureStore(Protocol):
    """Destination of captures.

    Attributes
    ----------
    quota
        Most bytes of captures that it may hold; None: no limit.
    compression
        Of updates, where it pays.
    """

    quota: int | None
    compression: Compression

    @property
    def place(self) -> str:
        """The folder or URL, for people."""

    def save(self, observation: Any) -> object:
        """Write one `Observation`, replacing an earlier one of the same round and client."""

    def note(self, name: str, line: str) -> None:
        """Append one line to a file in the folder of the rounds."""

    def retire(self, keep: int, before: int) -> list[RemovedRound]:
        """Remove rounds before ``before`` but for the last ``keep``; return what went."""


Content = bytes | mmap.mmap
"""A file's content, in memory or, of large tensors, in a file without a name."""


@dataclass(frozen=True)
class Encoded:
    """An observation as files.

    Attributes
    ----------
    own
        Content by the name of a file in the client's folder, ``observation.json`` last.
    sent
        Content by the name of a file in the round's `SENT`.
    """

    own: Mapping[str, Content]
    sent: Mapping[str, Content]

    @property
    def size(self) -> int:
        """Bytes of the client's own files."""
        return sum(map(len, self.own.values()))


def encode(
    observation: Any, compression: Compression = "none", *, spool: Path | None = None
) -> Encoded:
    """Return an `Observation` as files; large ones lie in ``spool`` until they are written."""

    def content(held: Tensors) -> Content:
        return tensors_as_bytes(held) if spool is None else tensors_on_disk(held, spool)

    groups: dict[Group, Tensors] = {group: getattr(observation, group) for group in GROUPS}
    shared = {g: content(groups[g]) for g in SHARED if groups[g]}
    digests = {group: sha256(held).hexdigest() for group, held in shared.items()}
    own = {
        f"{group}.safetensors": content(held)
        for group, held in groups.items()
        if held and group not in shared
    }
    size = _pack(own, shared) if compression == "zstd" else None
    try:
        description = ObservationFile(
            round=observation.round,
            client=observation.client,
            declaration=observation.declaration,
            provenance=Provenance(**observation.provenance),
            tensors={group: tuple(held) for group, held in groups.items()},
            sent=digests,
            rounded=observation.rounded,
            packed=size,
            uploaded=_uploaded(observation),
        ).model_dump_json(
            by_alias=True, indent=1, exclude={"declaration": _undeclared(observation.declaration)}
        )
    except ValidationError as error:
        raise BractError(
            f"{one_line(observation.key, 100)}: cannot be stored: {first_problem(error)}",
            code="message-malformed",
        ) from None
    own[DESCRIPTION] = description.encode("utf-8", errors="backslashreplace")
    return Encoded(own, {sent_name(d): shared[group] for group, d in digests.items()})


def _undeclared(declaration: ClientDeclaration) -> set[str]:
    """Return the fields that have their defaults: a capture lists what was declared alone."""
    blank = ClientDeclaration()
    return {f.name for f in fields(blank) if getattr(declaration, f.name) == getattr(blank, f.name)}


def _pack(own: dict[str, Content], shared: Mapping[Group, Content]) -> int | None:
    """Compress the update among a capture's own files where a reader will unpack it."""
    content = own.get(UPDATE)
    if content is None or len(content) > most_bytes(len(shared.get("parameters", b""))):
        return None
    found = packed(content)
    if found is None:
        return None
    del own[UPDATE]
    own[UPDATE + SUFFIX] = found
    return len(content)


def _uploaded(observation: Any) -> int:
    came: tuple[Tensors, ...] = (
        observation.update,
        observation.returned_buffers,
        observation.ciphertexts,
    )
    stored = sum(v.numel() * v.element_size() for tensors in came for v in tensors.values())
    loss: Rounding | None = observation.rounded
    return stored + (0 if loss is None else loss.saved)


def sent_file(round_folder: Path, digest: str) -> Path:
    """Return a round's shared file after its content was held against its name."""
    path = round_folder / SENT / sent_name(digest)
    try:
        known = path.lstat()
        if path.parent.is_symlink() or not stat.S_ISREG(known.st_mode):
            raise BractError(
                f"{SENT}/{path.name} is no file of this round's own", code="capture-damaged"
            )
        found = _digest((path, known.st_ino, known.st_size, known.st_mtime_ns))
    except FileNotFoundError:
        raise BractError(
            f"{SENT}/{path.name}, what the server sent, is not in its folder; copy whole rounds",
            code="capture-damaged",
        ) from None
    except OSError as error:
        raise BractError(
            f"{SENT}/{path.name}: {one_line(error, 200)}", code="capture-damaged"
        ) from None
    if found != digest:
        raise BractError(
            f"{SENT}/{path.name} is not what the capture refers to: its SHA-256 differs",
            code="capture-damaged",
        )
    return path


@lru_cache(maxsize=256)
def _digest(at: tuple[Path, int, int, int]) -> str:
    """Return the SHA-256 of a file of that inode, size and time; the same one is read once."""
    with at[0].open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def used_within(
    quota: int | None, used: int | None, new: int, count: Callable[[], int]
) -> int | None:
    """Return the bytes that captures take, where ``new`` ones more are within the quota.

    Parameters
    ----------
    used
        What was counted last; None before the first time, and where there is no quota.
    count
        Counts anew, because room may have been made meanwhile.

    Raises
    ------
    RoundLostError
        If they are not.
    """
    if quota is None:
        return used
    if used is None or used + new > quota:
        used = count()
    if used + new > quota:
        raise RoundLostError(
            f"capture.quota of {readable_size(quota)} is reached "
            f"({readable_size(used)} used, {readable_size(new)} needed)"
        )
    return used
