"""Start a SuperLink or a SuperNode as configured in its kit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NoReturn

from bract.disk.permissions import make_private_folder
from bract.kits import gateway
from bract.kits import kit as kits
from bract.kits.expiry import daily_check
from bract.kits.kit import (
    KitError,
    check_files,
    check_version,
    open_kit,
)
from bract.kits.site_file import read_site
from bract.runtime.audit_log import AUDIT_LOG
from bract.runtime.daily_check import set_daily_check
from bract.runtime.fork_server import Load
from bract.runtime.serving import (
    Certificate,
    start_superexec,
    start_superlink,
    start_supernode,
)

SOCKETS, STATE, RUNS = "sockets", kits.STATE, "runs"

_log = logging.getLogger(__name__)


def start_superlink_of(folder: Path, sockets: Path | None, *, external: bool = False) -> NoReturn:
    """Become the SuperLink of an operator's kit.

    Server apps are its children, or are left to `start_superexec_of` where ``external``.
    """
    kit = open_kit(folder, "operator")
    check_version(kit, folder)
    certificate = Certificate(
        folder / kits.SUPERLINK, folder / kits.SUPERLINK_KEY, folder / kits.CA
    )
    state = folder / STATE
    make_private_folder(state, private=True)
    _say_where_runs_go(folder)
    set_daily_check(daily_check(folder))
    os.environ[AUDIT_LOG] = str((state / "audit.jsonl").absolute())
    start_superlink(
        address=kit.superlink,
        folder=sockets or folder / SOCKETS,
        certificate=certificate,
        authenticate=True,
        database=state / "superlink.db",
        clients_ca=folder / kits.CA,
        external=external,
    )


def start_superexec_of(folder: Path, sockets: Path | None) -> NoReturn:
    """Become what starts server apps for the SuperLink of an operator's kit."""
    kit = open_kit(folder, "operator")
    check_version(kit, folder)
    _say_where_runs_go(folder)
    start_superexec((sockets or folder / SOCKETS) / f"{kit.superlink_port}.sock")


def _say_where_runs_go(folder: Path) -> None:
    """Let the server apps keep their runs in the kit, unless the environment sets another one."""
    from bract.server.capture_folders import CAPTURES  # no part of a client's image

    os.environ.setdefault(CAPTURES, str((folder / RUNS).absolute()))


def start_supernode_of(
    folder: Path, sockets: Path | None, *, health: bool, load: Load | None = None
) -> NoReturn:
    """Become the SuperNode of a site's kit, once its gateway was checked.

    ``load`` replaces the site file's.

    Raises
    ------
    BractError
        If the kit is damaged, or the gateway must not be trusted. One that does not
        answer yet is waited for.
    """
    folder = folder.absolute()
    kit = open_kit(folder, "site")
    site = read_site(folder, kit)
    check_whole(folder)
    try:
        soon = gateway.ask(kit, folder).soon
        if soon is not None:
            _log.warning("%s", soon)
    except gateway.UnreachableError as error:
        _log.warning("%s; it is tried again", error)
    set_daily_check(daily_check(folder))
    start_supernode(
        superlink=kit.address,
        app=site.app,
        node_config=site.node_config(folder),
        folder=sockets or folder / STATE / SOCKETS,
        port=site.port,
        root_certificates=folder / kits.CA,
        key=folder / kits.NODE_KEY,
        health=health,
        load=load or site.load,
    )


def check_whole(folder: Path) -> None:
    """Refuse a kit whose keys or certificates are not those that were issued."""
    broken = check_files(folder).broken
    if broken:
        raise KitError(
            f"{folder}: {'; '.join(broken)}; take the kit from where it was issued, and do not mix "
            "the files of two"
        )
