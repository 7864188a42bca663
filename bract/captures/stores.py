"""A store of an app's captures: one folder a run, and which of them is the latest.

``captures/RUN_ID/`` holds the captures of one run of a third-party app, what was audited of them
and the page, and ``captures/latest`` leads to the last one. ``store.json`` in it names the run, so
that a folder is known before its first capture. A folder that holds rounds itself is of the layout
before, and is read as one run.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from pathlib import Path

from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.errors import BractError
from bract.schema.record import RecordError
from bract.schema.store import StoreOwner

OWNER = "store.json"
LATEST = "latest"

_RUN = re.compile(r"[0-9]{1,20}")


def is_run_name(name: str | None) -> bool:
    """Return whether a name is one of a run's folder."""
    return name is not None and _RUN.fullmatch(name) is not None


def owner_of(folder: Path) -> StoreOwner | None:
    """Return the run that a folder is of; None where it does not say."""
    try:
        text = (folder / OWNER).read_bytes()
    except OSError:
        return None
    try:
        return StoreOwner.parse_text(text, source=str(folder / OWNER))
    except RecordError:
        return None


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is one run's in a store."""
    return is_run_name(folder.name) and (folder / OWNER).is_file()


def runs_in(store: Path) -> list[Path]:
    """Return the folders of a store's runs, the latest first."""
    try:
        found = [path for path in store.iterdir() if is_run_folder(path)]
    except OSError:
        return []
    link = _linked(store)

    def order(folder: Path) -> tuple[bool, float, str]:
        owner = owner_of(folder)
        return folder.name == link, 0.0 if owner is None else owner.started, folder.name

    return sorted(found, key=order, reverse=True)


def _linked(store: Path) -> str | None:
    """Return the name that ``latest`` leads to, where that is a run's next to it."""
    with contextlib.suppress(OSError):
        name = str((store / LATEST).readlink())
        return name if is_run_name(name) else None
    return None


def check_unoccupied(folder: Path, owner: StoreOwner | None) -> None:
    """Refuse a folder that holds the captures of another run or app.

    Raises
    ------
    BractError
        Naming the run or app that it is of. An owner of None is a process outside of any run.
    """
    known = owner_of(folder)
    this = "no run of Flower's" if owner is None else f"run {owner.run_id} of {owner.app}"
    if known is not None and (
        owner is None or (known.run_id, known.app) != (owner.run_id, owner.app)
    ):
        raise BractError(
            f"{folder}: holds the captures of run {known.run_id} of {known.app}, and this is "
            f"{this}; name another store",
            code="file-taken",
        )
    if known is None and any(folder.glob("round-*")):
        raise BractError(
            f"{folder}: holds the captures of an earlier run; name another store, or move them",
            code="file-taken",
        )


def occupy(folder: Path, owner: StoreOwner) -> None:
    """Make a run's folder, and have ``latest`` lead to it."""
    make_private_folder(folder)
    if owner_of(folder) is None:
        write_text(folder / OWNER, owner.to_text())
    link = folder.with_name(f".{LATEST}.{uuid.uuid4().hex}.tmp")
    # A file system without links has no `latest`; the start times say it as well.
    with contextlib.suppress(OSError):
        link.symlink_to(folder.name)
        link.replace(folder.parent / LATEST)
