"""The place of a server app's captures: the folder that the operator of the server sets."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bract.captures.stores import check_unoccupied
from bract.disk.permissions import make_private_folder, warn_if_open
from bract.errors import BractError, one_line
from bract.installed.app_folder import app_folder, running_app
from bract.schema.store import StoreOwner

CAPTURES = "BRACT_CAPTURES"
"""Environment variable of the SuperLink, or of the process that starts its server apps, with the
absolute folder below which each run gets a folder of its own."""


def captures_folder() -> Path | None:
    """Return the folder that the operator named, None where none is named."""
    named = os.environ.get(CAPTURES)
    if not named:
        return None
    folder = Path(named)
    if not folder.is_absolute():
        raise BractError(
            f"{CAPTURES}={named}: expected an absolute path; a relative one would depend on where "
            "the SuperLink was started",
            code="config-value",
        )
    return folder


def usable_captures_folder() -> Path | None:
    """Return `captures_folder`, which is made where it is missing."""
    folder = captures_folder()
    if folder is None:
        return None
    try:
        make_private_folder(folder)
    except OSError as error:
        raise BractError(
            f"{CAPTURES}={folder}: cannot be made ({one_line(error, 200)}); name a folder that "
            "this user may write in",
            code="file-unwritable",
        ) from error
    warn_if_open(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BractError(
            f"{CAPTURES}={folder}: this user may not write there; name a folder of its own, or "
            f"chown it to user {os.getuid()}",
            code="file-unwritable",
        )
    return folder


def run_folder(name: str, run_id: int) -> Path:
    """Return the run directory of bract's own app if the submitter named none."""
    return (captures_folder() or Path("runs")) / f"{name}-{run_id}"


def owner_of_run(run_id: int | None = None) -> StoreOwner | None:
    """Return a run as the owner of its captures; None outside of a run.

    Parameters
    ----------
    run_id
        As a grid knows it; None takes that of this process, which Flower knows from 1.37 on.
    """
    number = _run_of_process() if run_id is None else run_id
    if number is None:
        return None
    app = running_app()
    return StoreOwner(
        run_id=str(number), app=None if app is None else app.name, started=time.time()
    )


def _run_of_process() -> int | None:
    try:
        from bract.installed.flower import TaskIdentity

        return int(TaskIdentity.run_id)
    except (ImportError, AttributeError, RuntimeError):
        return None


def folder_of_run(store: Path, owner: StoreOwner | None) -> Path:
    """Return the folder of one run in a store that an app names by its path.

    A relative store is in the app's own folder (`bract.installed.app_folder`); each run has one of
    its own below the store, ``captures/RUN_ID``, unless the operator named a folder
    (`store_folder`).

    Raises
    ------
    BractError
        If that folder is taken by another run or app, or the app's is not found.
    """
    if captures_folder() is not None and not store.is_absolute():
        return store_folder(store, owner)
    try:
        placed = store if store.is_absolute() else app_folder() / store
        if owner is not None:
            placed = placed / owner.run_id
        check_unoccupied(placed, owner)
    except BractError as error:
        raise BractError(f"HonestButCurious: store is {store}: {error}", code=error.code) from None
    return placed


def store_folder(store: Path, owner: StoreOwner | None) -> Path:
    """Return where the captures of an app go that asks for ``store``.

    An absolute folder is taken. A relative one is, if the operator named a folder, below it
    and a folder of this run's own: ``$BRACT_CAPTURES/run-<id>/captures``.
    """
    folder = captures_folder()
    if folder is None or store.is_absolute():
        return store
    if ".." in store.parts:
        raise BractError(
            f"HonestButCurious: store is {store}, and {CAPTURES} is {folder}; name a folder below "
            "it, such as 'captures', or an absolute one",
            code="config-value",
        )
    run = "run" if owner is None else f"run-{owner.run_id}"
    return folder / run / store
