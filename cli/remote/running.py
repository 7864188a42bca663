"""``bract run --superlink HOST:PORT``: submit a federation to another machine, and follow it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bract.cli.bundle import app_manifest
from bract.cli.console import say
from bract.cli.options import refuse
from bract.cli.remote.connection import (
    Control,
    LostError,
    UnknownRunError,
    UnreachableError,
    connect,
)
from bract.cli.remote.run_log import Followed, follow
from bract.cli.remote.where import Where
from bract.cli.signals import Stopped
from bract.config import FederationConfig
from bract.errors import BractError, RunFailedError

NODES_PATIENCE = 30.0
"""Seconds in which SuperNodes that are missing may connect."""


def run_remotely(config: FederationConfig, where: Where) -> Followed:
    """Train the federation at a SuperLink whose machine shares nothing with this one.

    Raises
    ------
    BractError
        If the configuration cannot work there, the SuperLink cannot be reached or must not be
        trusted, or too few SuperNodes are connected.
    RunFailedError
        If the run fails.
    """
    check_remote(config)
    with connect(where) as control:
        wait_for_nodes(control, config.clients)
        run_id = _submit(control, config)
        say(
            f"federation {config.name}: {config.clients} clients, {config.rounds} rounds, "
            f"run {run_id} at {control.address}"
        )
        followed = follow_on(control, run_id, where)
    tell_next(followed)
    return followed


def _submit(control: Control, config: FederationConfig) -> int:
    try:
        return control.start({"pyproject.toml": app_manifest(config, None).encode()})
    except Stopped as stopped:
        stopped.add_note(
            f"{control.address} may have taken the run all the same; `flwr ls` lists its runs"
        )
        raise


def follow_on(control: Control, run_id: int, where: Where) -> Followed:
    """Follow a run; if interrupted, explain that it continues and how to reconnect."""
    with _going_on(run_id, where):
        return follow(control, run_id)


@contextmanager
def _going_on(run_id: int, where: Where) -> Iterator[None]:
    again = f"follow it with `bract follow {run_id} {where.options}`"
    try:
        yield
    except Stopped as stopped:
        stopped.add_note(
            f"run {run_id} goes on at {where.superlink}; {again}, "
            f"stop it with `bract stop {run_id} {where.options}`"
        )
        raise
    except UnknownRunError as error:
        raise RunFailedError(
            f"{error}: the SuperLink was started again, and had no --database to keep it in"
        ) from error
    except (LostError, UnreachableError) as error:
        raise LostError(f"{error}; {again}") from error


def tell_next(followed: Followed) -> None:
    """Print the run's folder, and the next step."""
    if not followed.folder:
        say(f"done: run {followed.run_id}, of an app without progress reports; see `flwr log`")
        return
    folder = shlex.quote(followed.folder)
    say(
        f"done: run {followed.run_id}, stored at the server in {followed.folder}; next, there: "
        f"bract audit {folder}; then bring report, metrics and model here: "
        f"ssh SERVER bract pack {folder} --out - | bract pull - --out DIR"
    )


def refuse_local(given: Mapping[str, object]) -> None:
    """Refuse options that are about processes and folders of this machine."""
    refuse(
        given,
        "only for clients and run directories of this machine; at a remote SuperLink each site "
        "sets this itself (site.yaml), and every run is a new one",
    )


def check_remote(config: FederationConfig) -> None:
    """Refuse, or warn of, settings that only clients have that this command starts itself.

    Raises
    ------
    BractError
        If no client would make the keys of an encrypted run, or it audits no client of its own.
    """
    if config.sites is not None:
        config.check_chosen_clients(config.sites, config.name)
    encryption = config.encryption
    if encryption.uses_key_files and encryption.key_id is None:
        raise BractError(
            "encryption.keys: provisioned without encryption.key_id: `bract run` makes keys for "
            "clients that it starts itself, and the sites of a remote SuperLink bring theirs; "
            "deal them with `bract provision`, whose federation.yaml names the key, or set "
            "encryption.keys: in-band",
            code="config-conflict",
        )
    if config.truth:
        say(
            "warning: truth: true does nothing at a remote SuperLink: each site decides "
            "whether it keeps truth (truth in its site.yaml)"
        )
    for caution in encryption.cautions(config.clients, config.strategy.name):
        say(f"warning: {caution}")


def wait_for_nodes(control: Control, wanted: int) -> None:
    """Return once as many SuperNodes are connected as the federation has clients."""
    deadline = time.monotonic() + NODES_PATIENCE
    announced = False
    while True:
        there, away = control.nodes()
        if len(there) >= wanted:
            return
        if time.monotonic() > deadline:
            break
        if not announced:
            announced = True
            say(f"waiting for SuperNodes: {len(there)} of {wanted} are connected")
        time.sleep(1.0)
    raise BractError(
        f"clients is {wanted}, and {len(there)} SuperNodes are connected to {control.address}"
        f"{_named(there)}{', away: ' + ', '.join(away[:8]) if away else ''}; at a remote SuperLink "
        "`bract run` starts none: have the sites start theirs, or lower clients",
        code="clients-missing",
    )


def _named(names: list[str]) -> str:
    return f" ({', '.join(names[:8])})" if names else ""
