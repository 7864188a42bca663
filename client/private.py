"""Files and folders that are a client's own, which others may neither read nor write."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from bract.disk.permissions import warn_if_open
from bract.errors import BractError

_WARNED = "bract.warned-of-folders"


class OwnFileError(BractError):
    """A failure of the site's own files or settings, whose reason stays at the site."""

    code = "file-unreadable"


@contextmanager
def own_files() -> Iterator[None]:
    """Mark errors of the block as those of the site's own files, whatever their code.

    Raises
    ------
    OwnFileError
        In the place of a `BractError`, with its code and text.
    """
    try:
        yield
    except BractError as error:
        raise OwnFileError(str(error), code=error.code) from error


def warn_of_open_folders(state: RecordDict, *folders: Path | None) -> None:
    """Log which folders of this client others can read, once a run.

    Parameters
    ----------
    state
        ``context.state`` of the running message: each message has a process of its own.
    """
    seen = state.get(_WARNED)
    stored = seen["folders"] if isinstance(seen, ConfigRecord) else []
    known = set(map(str, stored)) if isinstance(stored, list) else set()
    warned = {str(f) for f in folders if f and str(f) not in known and warn_if_open(f)}
    if warned:
        state[_WARNED] = ConfigRecord({"folders": sorted(known | warned)})


class ContextTexts(MutableMapping[str, str]):
    """Texts in one record of Flower's ``context.state``, for a site without a folder of its own."""

    def __init__(self, state: RecordDict, record: str) -> None:
        self._state, self._record = state, record

    def __getitem__(self, name: str) -> str:
        return str(self._held()[name])

    def __setitem__(self, name: str, text: str) -> None:
        self._state[self._record] = ConfigRecord({**self._held(), name: text})

    def __delitem__(self, name: str) -> None:
        held = self._held()
        del held[name]
        self._state[self._record] = ConfigRecord(held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    def _held(self) -> dict[str, Any]:
        stored = self._state.get(self._record)
        return dict(stored) if isinstance(stored, ConfigRecord) else {}
