"""A site's number of refused messages, and the last reason: for its operator alone."""

from __future__ import annotations

import contextlib
import datetime
import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from bract.disk import read_private
from bract.disk.files import write_text
from bract.disk.locks import lock
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line
from bract.schema.record import VersionedRecord


class Refusals(VersionedRecord):
    """``NAME-refused.json`` in a site's state: nothing of it is sent.

    Attributes
    ----------
    count
        Messages that were refused.
    last, reason
        When the last one was, ISO 8601, UTC, and why.
    """

    kind: ClassVar[str] = "record of refusals"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    count: int = 0
    last: str | None = None
    reason: str | None = None


def read_refusals(folder: Path, site: str) -> Refusals:
    """Return a site's refusals; none if there is no record."""
    path = _path(folder, site)
    text = read_private(path)
    return Refusals() if text is None else Refusals.parse_text(text, source=str(path))


def note_refusal(folder: Path | None, site: str, error: Exception) -> None:
    """Count one more refusal; a record that cannot be written does not hide the refusal itself."""
    if folder is None:
        return
    path = _path(folder, site)
    with contextlib.suppress(BractError, OSError):
        make_private_folder(folder)
        place = path.with_name(f".{path.name}.lock")
        with lock(place, what=str(path), doing="refusal", patience=5):
            changed = {
                "count": read_refusals(folder, site).count + 1,
                "last": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "reason": one_line(error, 500),
            }
            record = Refusals().model_copy(update=changed)
            write_text(path, record.to_text(), private=True)


def _path(folder: Path, site: str) -> Path:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", site)
    return folder / f"{plain}-refused.json"
