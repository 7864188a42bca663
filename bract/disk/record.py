"""A record that several processes change: opened, locked, read, checked, written, read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from bract.disk.files import write_text
from bract.disk.private import locked, read_private
from bract.errors import BractError, SchemaError, one_line, shown

Kept = TypeVar("Kept", bound=BaseModel)
"""What a record holds; its own validators say what it may."""

Memory = MutableMapping[str, str]
"""Texts by name, for where there is no folder."""


class LockedRecord(Generic[Kept]):
    """One record of a party, in a private file or in memory.

    A change is made under a lock, and on the disk, under the file's name, before `changing` ends.
    Nothing is written that cannot be read again as it was, so no NaN or infinity either.

    Parameters
    ----------
    kind
        Its type, which is empty without arguments.
    path
        The file, mode 0600 and no link; None keeps it in ``memory``, without a lock.
    memory, name
        Where it is kept else.
    what, fix
        What the record is, and how to restore it, as errors state it.
    adopt
        Called with what was read: adds what earlier files hold, and returns these files. They are
        removed once the sum is written.
    """

    def __init__(
        self,
        kind: type[Kept],
        path: Path | None,
        memory: Memory,
        name: str,
        *,
        what: str,
        fix: str,
        adopt: Callable[[Kept], list[Path]] = lambda _: [],
    ) -> None:
        self._kind, self._path, self._memory, self._name = kind, path, memory, name
        self._what, self._fix, self._adopt = what, fix, adopt
        self._adopted: list[Path] = []

    def load(self) -> Kept:
        """Return what the record holds.

        Raises
        ------
        BractError
            If it is damaged, open to others or a link.
        """
        if self._path is None:
            data: bytes | str | None = self._memory.get(self._name)
        else:
            data = read_private(self._path, links=False)
        found = self._kind()
        if data is not None:
            source = str(self._path or self._name)
            found = parse_record(self._kind, data, source=source, what=self._what, fix=self._fix)
        self._adopted = self._adopt(found)
        return found

    @contextmanager
    def changing(self) -> Iterator[Kept]:
        """Give what the record holds; it is written at the end unless the block raises.

        Raises
        ------
        BractError
            As `load`, or if it cannot be locked or written, or not be read again.
        """
        if self._path is None:
            found = self.load()
            yield found
            self._memory[self._name] = self._text(found)
            return
        try:
            with locked(self._path.with_name(f".{self._path.stem}.lock")):
                found = self.load()
                before = found.model_copy(deep=True)
                yield found
                if found != before or self._adopted:
                    write_text(self._path, self._text(found), private=True)
                for earlier in self._adopted:
                    earlier.unlink(missing_ok=True)
        except OSError as error:
            raise BractError(
                f"{self._path}: {self._what} cannot be written ({one_line(error)}); set "
                "state-dir in the node config to a folder that this client may write",
                code="file-unwritable",
            ) from error

    def _text(self, held: Kept) -> str:
        """Return the text of a record that reads back to the same."""
        text = held.model_dump_json()
        try:
            same = self._kind.model_validate_json(text) == held
            why = "it reads as another one"
        except ValidationError as error:
            same, why = False, one_line(error, 200)
        if not same:
            raise BractError(
                f"{self._what} could not be read again with this message: {why}",
                code="request-refused",
            )
        return text


def parse_record(kind: type[Kept], text: bytes | str, *, source: str, what: str, fix: str) -> Kept:
    """Read the text of a record; ``source`` names it in errors.

    Raises
    ------
    SchemaError
        If another release wrote it, with another ``schema_version``.
    BractError
        If it is damaged.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        for problem in error.errors():
            if problem["loc"] == ("schema_version",):
                raise SchemaError(
                    f"{source}: {what} has schema {shown(problem['input'])}, which this release "
                    "does not read; install the bract that wrote it"
                ) from error
        raise BractError(
            f"{source}: {what} is damaged ({error.error_count()} errors: "
            f"{one_line(error.errors()[0]['msg'], 100)}); {fix}",
            code="file-damaged",
        ) from error
