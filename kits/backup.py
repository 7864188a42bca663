"""An encrypted copy of one party's keys and state, and its restoration.

The copy is a tar archive under AES-256-GCM, its key derived from a passphrase by scrypt. What a
site answered and spent only ever grows, so a copy is never restored over a record that has grown
since: a server could ask for the same rounds again under an older record.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from bract.disk import check_file
from bract.disk.files import replacing, write_bytes
from bract.disk.named import unreadable
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line
from bract.kits.kit import KIT, SITES, Kit, KitError, read_kit
from bract.kits.site_file import read_site
from bract.kits.starting import SOCKETS, STATE
from bract.runtime import sockets

SHORTEST = 12
"""Characters of the shortest passphrase."""

MOST_BYTES = 1 << 30
"""Bytes of all files of a copy."""

_MAGIC = b"bract backup 1\n"
_SALT, _NONCE = 16, 12
_COST = 1 << 17
"""scrypt's n; with r = 8 one guess takes 128 MiB and a good part of a second."""

_TOP = (SOCKETS, "superlink.db", "superlink.db-journal", "superlink.db-shm", "superlink.db-wal")
"""Names directly below a kit or its state that are in no copy: sockets of running processes; the
SuperLink's database, which `bract site register` fills again."""

_ENDINGS = (".lock", ".reply", "-refused.json")
"""Endings of files' names that are in no copy: locks; replies, without which a repeated message is
refused; the count of refusals, which limits nothing. No record of a site or federation ends so,
whatever their names are."""


@dataclass(frozen=True)
class Restored:
    """Whose copy was restored, and when it was made (ISO 8601, UTC)."""

    kit: Kit
    made: str


def back_up(folder: Path, out: Path, passphrase: str) -> int:
    """Write an encrypted copy of a kit's files and state; return how many files it holds.

    Raises
    ------
    BractError
        If the passphrase is short, ``out`` exists, or a file cannot be read.
    """
    if len(passphrase) < SHORTEST:
        raise BractError(
            f"the passphrase has {len(passphrase)} characters, expected {SHORTEST}", code="usage"
        )
    if out.exists():
        raise BractError(f"{out}: exists already; name another file", code="file-taken")
    folder = folder.absolute()
    content = io.BytesIO()
    count, size = 0, 0
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, path in _files(folder, read_kit(folder)):
            try:
                data = path.read_bytes()
            except OSError as error:
                raise unreadable(path, error, BractError) from error
            count, size = count + 1, size + len(data)
            if size > MOST_BYTES:
                raise BractError(
                    f"{folder}: more than {MOST_BYTES} bytes; move old state away",
                    code="file-unreadable",
                )
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), path.stat().st_mode & 0o777
            entry.mtime = int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(data))
    salt, nonce = os.urandom(_SALT), os.urandom(_NONCE)
    head = _MAGIC + salt + nonce
    sealed = AESGCM(_key(passphrase, salt)).encrypt(nonce, content.getvalue(), head)
    write_bytes(out, head + sealed, private=True)
    return count


def restore(copy: Path, folder: Path, passphrase: str) -> Restored:
    """Restore a copy as a new kit, or over a kit whose record has not grown since.

    Raises
    ------
    KitError
        If the kit in ``folder`` is another party's, serves, or has answered since the copy.
    BractError
        If the passphrase or the copy is wrong.
    """
    folder = folder.absolute()
    made = datetime.datetime.fromtimestamp(copy.stat().st_mtime, datetime.UTC)
    make_private_folder(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".restored-") as place:
        found = Path(place) / folder.name
        _unpack(_open(copy, passphrase), found, copy)
        kit = read_kit(found)
        if folder.exists():
            _check_current(folder, kit, found)
            targets = [(path, _target(folder, kit, name)) for name, path in _all(found)]
            for path, target in targets:
                make_private_folder(target.parent, private=True)
                write_bytes(target, path.read_bytes(), private=True)
                target.chmod(path.stat().st_mode & 0o777)
        else:
            with replacing(folder) as temporary:
                found.rename(temporary)
    return Restored(kit, made.strftime("%Y-%m-%dT%H:%M:%SZ"))


def _check_current(folder: Path, kit: Kit, found: Path) -> None:
    current = read_kit(folder)
    if (current.authority, current.name) != (kit.authority, kit.name):
        raise KitError(
            f"{folder}: the kit of {current.name} in {current.federation}, and the copy is of "
            f"{kit.name} in {kit.federation}; name another folder",
            code="identity-refused",
        )
    state = _state(folder, current)
    served = [path for path in (state / SOCKETS, folder / SOCKETS) if _serves(path)]
    if served:
        raise KitError(
            f"{folder}: its processes run ({served[0]}); end them first", code="file-locked"
        )
    # The copy's site.yaml may name another folder for the state than the present one.
    places = {state, folder / _state(found, kit).relative_to(found)}
    grown = [
        name
        for place in sorted(places)
        for name, path in _all(place)
        if _has_grown(path, found / STATE / name)
    ]
    # The record of a key's failed aggregates is in the folder of the key.
    kept = [path for path in folder.glob("*.json") if path.name not in (KIT, SITES)]
    grown += [path.name for path in kept if _has_grown(path, found / path.name)]
    if grown:
        raise KitError(
            f"{state}: {', '.join(grown[:3])} went on after this copy was made, and an older "
            "record would let a server ask for answered rounds again; keep the state that is there",
            code="file-taken",
        )


def _has_grown(current: Path, copied: Path) -> bool:
    """Return whether a file of the state holds anything that its copy does not."""
    if not copied.is_file():
        return True
    here, there = current.read_bytes(), copied.read_bytes()
    if here == there:
        return False
    try:
        return not _covers(json.loads(there), json.loads(here))
    except (ValueError, RecursionError):
        return True


def _covers(later: Any, earlier: Any) -> bool:
    """Return whether ``later`` can be a successor of ``earlier``: no figure is lower or missing.

    A list has grown at its end. Anything else may differ only along with a figure that has grown.
    """
    if isinstance(earlier, list) and isinstance(later, list):
        return later[: len(earlier)] == earlier
    if not isinstance(earlier, dict) or not isinstance(later, dict):
        return bool(later == earlier)
    if not set(earlier) <= set(later):
        return False
    pairs = [(value, later[key]) for key, value in earlier.items()]
    figures = [pair for pair in pairs if _is_figure(pair[0])]
    if any(not _is_figure(there) or there < here for here, there in figures):
        return False
    grown = any(there > here for here, there in figures)
    return all(
        _covers(there, here)
        for here, there in pairs
        if isinstance(here, dict) or not (grown or _is_figure(here))
    )


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _files(folder: Path, kit: Kit) -> Iterator[tuple[str, Path]]:
    """Yield the content of a copy: the kit's own files, and the state, below `STATE`."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.is_symlink() and not _is_left_out(path.relative_to(folder)):
            yield path.name, path
    for name, path in _all(_state(folder, kit)):
        yield f"{STATE}/{name}", path


def _all(folder: Path) -> list[tuple[str, Path]]:
    return [
        (path.relative_to(folder).as_posix(), path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and not _is_left_out(path.relative_to(folder))
    ]


def _is_left_out(path: PurePath) -> bool:
    """Return whether no copy holds a file, by its path from the kit or its state."""
    unfinished = any(part.startswith(".") and part.endswith(".tmp") for part in path.parts)
    return path.parts[0] in _TOP or path.name.endswith(_ENDINGS) or unfinished


def _state(folder: Path, kit: Kit) -> Path:
    """Return where a party keeps its state; a site may have moved its own."""
    return folder / (read_site(folder, kit).state if kit.role == "site" else STATE)


def _target(folder: Path, kit: Kit, name: str) -> Path:
    first, _, rest = name.partition("/")
    return _state(folder, kit) / rest if first == STATE and rest else folder / name


def _serves(folder: Path) -> bool:
    return any(sockets.is_served(path) for path in folder.glob("*.sock"))


def _open(copy: Path, passphrase: str) -> bytes:
    try:
        text = check_file(copy).read_bytes()
    except OSError as error:
        raise unreadable(copy, error, BractError) from error
    if not text.startswith(_MAGIC):
        raise BractError(f"{copy}: no copy that `bract site backup` has made", code="file-damaged")
    head, sealed = text[: len(_MAGIC) + _SALT + _NONCE], text[len(_MAGIC) + _SALT + _NONCE :]
    salt, nonce = head[len(_MAGIC) : -_NONCE], head[-_NONCE:]
    try:
        return AESGCM(_key(passphrase, salt)).decrypt(nonce, sealed, head)
    except (InvalidTag, ValueError) as error:
        raise BractError(
            f"{copy}: another passphrase, or the file was changed", code="file-damaged"
        ) from error


def _unpack(content: bytes, folder: Path, copy: Path) -> None:
    folder.mkdir(mode=0o700)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise BractError(
            f"{copy}: cannot be unpacked: {one_line(error, 200)}", code="file-damaged"
        ) from error
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            path.chmod(0o700 if path.is_dir() else path.stat().st_mode & 0o755)


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=_COST, r=8, p=1).derive(passphrase.encode())
