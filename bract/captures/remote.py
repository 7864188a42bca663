"""Captures at a URL of fsspec's (S3, GCS, memory and many more): written there, fetched from there.

A file is put whole, and a capture's ``observation.json`` last, so no reader takes half a
capture for a whole one. An audit reads a local copy (`fetch`). A URL that begins with ``file://``
is a local folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.captures.captured import (
    DESCRIPTION,
    LONGEST_DESCRIPTION,
    SENT,
    round_name,
    round_of,
)
from bract.captures.observation import Observation
from bract.captures.packing import SUFFIX
from bract.captures.storing import (
    GROUPS,
    UPDATE,
    Content,
    RoundLostError,
    encode,
    used_within,
)
from bract.config.capture import URL, Compression, check_store
from bract.config.client_names import check_name
from bract.disk.files import readable_size, replacing, write_bytes
from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, one_line, without_credentials
from bract.schema.capture import MISSED, REMOVED, RemovedRound
from bract.schema.claims import CLAIMS
from bract.schema.left import LEFT

_SENT_FILE = re.compile(r"[0-9a-f]{64}\.safetensors")
_OWN_FILES = {DESCRIPTION, UPDATE + SUFFIX, *(f"{group}.safetensors" for group in GROUPS)}
_LISTS = (CLAIMS, LEFT, MISSED, REMOVED)
_PIECE = 1 << 23
"""Bytes that are copied at a time."""


def local_folder(where: Path | str) -> Path | None:
    """Return the folder that a path or a ``file://`` URL names; None for another URL."""
    text = str(where)
    if isinstance(where, Path) or not URL.fullmatch(text):
        return Path(where)
    for scheme in ("file://", "local://"):
        if text.lower().startswith(scheme):
            return Path(text[len(scheme) :])
    return None


class RemoteStore:
    """Captures at a URL, as `ObservationStore` lays them out in a folder."""

    def __init__(self, url: str, *, quota: int | None = None) -> None:
        self.url = re.sub(r"(?<=[^/:])/+$", "", url)
        self.quota = quota
        self.compression: Compression = "none"
        self._used: int | None = None
        self._lists: dict[str, bytes] = {}
        try:
            check_store(self.url)
            import fsspec

            self._files, root = fsspec.core.url_to_fs(self.url)
        except Exception as error:
            raise BractError(
                f"{_safe(url)}: cannot be used as a store: {_words(error)}", code="file-unreadable"
            ) from error
        self._root = str(root).rstrip("/")
        self._is_local = local_folder(self.url) is not None

    @property
    def place(self) -> str:
        """The URL, without what may be secret in it."""
        return _safe(self.url)

    def save(self, observation: Observation) -> None:
        """Put one observation, replacing an earlier one of the same round and client.

        Raises
        ------
        BractError
            If it cannot be stored; `RoundLostError` where ``quota`` is reached, or the place does
            not take it, so that a round does not wait for it once more with every client.
        """
        encoded = encode(observation, self.compression)
        home = f"{round_name(observation.round)}/{check_name(observation.client)}"
        shared = f"{round_name(observation.round)}/{SENT}"
        with self._asked(RoundLostError):
            missing = {
                f"{shared}/{name}": content
                for name, content in encoded.sent.items()
                if self._size(f"{shared}/{name}") != len(content)
            }
            earlier = self._below(home)
            size = encoded.size + sum(map(len, missing.values()))
            new = size - sum(earlier.values())
            self._used = used_within(self.quota, self._used, new, self._count)
            if earlier:
                # First of all the file that marks it as whole.
                self._files.rm_file(self._at(f"{home}/{DESCRIPTION}"))
            for name, content in missing.items():
                self._put(name, content)
            for name, content in encoded.own.items():
                self._put(f"{home}/{name}", content)
        if self._used is not None:
            self._used += new

    def _count(self) -> int:
        return sum(size for name, size in self._below("").items() if _round(name) is not None)

    def note(self, name: str, line: str) -> None:
        """Append one line to a file in the folder of the rounds, by writing all of it anew."""
        with self._asked(BractError):
            if name not in self._lists:
                there = self._size(name) is not None
                self._lists[name] = self._files.cat_file(self._at(name)) if there else b""
            content = self._lists[name] + line.encode() + b"\n"
            self._put(name, content)
            self._lists[name] = content

    def retire(self, keep: int, before: int) -> list[RemovedRound]:
        """Remove earlier rounds, as `ObservationStore.retire` does; an audit reads its own copy."""
        with self._asked(BractError):
            there = self._below("")
            numbers = sorted(
                {n for name in there if (n := _round(name)) is not None and n < before}
            )
            return [
                self._remove(number, {m: s for m, s in there.items() if _round(m) == number})
                for number in numbers[: max(0, len(numbers) - keep)]
            ]

    def _remove(self, number: int, files: dict[str, int]) -> RemovedRound:
        whole = [name for name in files if name.endswith(f"/{DESCRIPTION}")]
        gone = RemovedRound(
            round=number, captures=len(whole), size=sum(files.values()), time=time.time()
        )
        self.note(REMOVED, gone.model_dump_json(by_alias=True))
        for name in [*whole, *(name for name in files if name not in whole)]:
            self._files.rm_file(self._at(name))
        with contextlib.suppress(Exception):  # object stores have no folders that stay behind
            self._files.rm(self._at(round_name(number)), recursive=True)
        if self._used is not None:
            self._used -= gone.size
        return gone

    @property
    def is_empty(self) -> bool:
        """Return whether no round is stored here."""
        with self._asked(BractError):
            return all(_round(name) is None for name in self._below(""))

    def fetch(self, out: Path) -> list[str]:
        """Copy captures to a local store; return the keys of those that were not there yet.

        Taken is what a capture consists of, by name: no other file, and no name that would leave
        the folder. What the tensors and descriptions hold is checked when they are read.
        """
        with self._asked(BractError):
            there = self._below("")
        homes = sorted(
            name.removesuffix(f"/{DESCRIPTION}")
            for name in there
            if name.endswith(f"/{DESCRIPTION}") and _known(name)
        )
        if not homes:
            raise BractError(f"{self.place}: holds no captures", code="captures-none")
        wanted = sum(size for name, size in there.items() if _known(name))
        self._check_room(out, wanted)
        fetched = [home for home in homes if self._fetch(home, there, out)]
        for name in _LISTS:
            if name in there:
                self._copy(name, there[name], out / name)
        return fetched

    def _fetch(self, home: str, there: dict[str, int], out: Path) -> bool:
        description = self._text(f"{home}/{DESCRIPTION}")
        final = out / home
        number = home.partition("/")[0]
        own = {n: s for n, s in there.items() if n.rpartition("/")[0] == home and _known(n)}
        # A reply that is captured anew has another time of arrival, and so another description.
        if all(_size(out / name) == size for name, size in own.items()) and (
            (final / DESCRIPTION).read_bytes() == description
        ):
            return False
        for name, size in there.items():
            local = out / name
            mine = name.startswith(f"{number}/{SENT}/") and _known(name)
            if mine and _size(local) != size:
                self._copy(name, size, local)
        with replacing(final) as temporary:
            make_private_folder(temporary)
            for name, size in own.items():
                file = name.rpartition("/")[2]
                if file == DESCRIPTION:
                    write_bytes(temporary / file, description)
                else:
                    self._copy(name, size, temporary / file)
        return True

    def _check_room(self, out: Path, wanted: int) -> None:
        there = next(p for p in (out.absolute(), *out.absolute().parents) if p.is_dir())
        held = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
        free = shutil.disk_usage(there).free
        if wanted - held > free:
            raise BractError(
                f"{out}: no space left for {self.place} "
                f"({readable_size(wanted - held)} needed, {readable_size(free)} free)",
                code="file-unwritable",
            )

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _put(self, name: str, content: Content) -> None:
        if self._is_local:
            write_bytes(Path(self._at(name)), content)
            return
        self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._at(name), content)

    def _text(self, name: str) -> bytes:
        """Return a description; one that is too long is read no further than that."""
        with self._asked(BractError), self._files.open(self._at(name), "rb") as file:
            return bytes(file.read(LONGEST_DESCRIPTION + 1))

    def _copy(self, name: str, size: int, to: Path) -> None:
        """Write a file of the place, of which it listed the size, to this disk."""
        with (
            replacing(to, size=size) as temporary,
            open(temporary, "xb", opener=open_private) as file,
        ):
            for piece in self._pieces(name, size):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def _pieces(self, name: str, size: int) -> Iterator[bytes]:
        """Return the bytes of a file in pieces, and never more than were listed."""
        left = size
        with self._asked(BractError), self._files.open(self._at(name), "rb") as source:
            while left >= 0 and (piece := source.read(min(_PIECE, left + 1))):
                left -= len(piece)
                if left >= 0:
                    yield piece
        if left:
            raise BractError(
                f"{self.place}: {name} has {'more' if left < 0 else 'fewer'} bytes than the "
                f"{size:,} that were listed; fetch again when nothing is written there",
                code="file-damaged",
            )

    def _size(self, name: str) -> int | None:
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._at(name))["size"])
        except FileNotFoundError:
            return None

    def _below(self, name: str) -> dict[str, int]:
        """Return the sizes of files below a folder, by their names from the root on."""
        self._files.invalidate_cache()
        found = self._files.find(self._at(name), detail=True)
        return {
            path[len(self._root) :].lstrip("/"): int(about.get("size") or 0)
            for path, about in found.items()
            if path.startswith(f"{self._root}/")
        }

    @contextlib.contextmanager
    def _asked(self, kind: type[BractError]) -> Iterator[None]:
        """Turn whatever a file system of fsspec's raises into one line that names the place."""
        try:
            yield
        except BractError:
            raise
        except Exception as error:
            raise kind(f"{self.place}: {_words(error)}", code="file-unreadable") from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _round(name: str) -> int | None:
    return round_of(name.partition("/")[0]) if "/" in name else None


def _known(name: str) -> bool:
    """Return whether a file belongs to a capture, so that no other is taken."""
    parts = name.split("/")
    if len(parts) != 3 or round_of(parts[0]) is None:
        return False
    if parts[1] == SENT:
        return _SENT_FILE.fullmatch(parts[2]) is not None
    try:
        check_name(parts[1])
    except BractError:
        return False
    return parts[2] in _OWN_FILES


def _safe(url: str) -> str:
    """Return a URL as one line, without user, password and query."""
    return one_line(without_credentials(url), 300)


def _words(error: Exception) -> Any:
    text = one_line(without_credentials(error), 300) or "no reason given"
    return (
        text if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {text}"
    )
