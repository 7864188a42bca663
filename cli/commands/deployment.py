"""``bract superlink``, ``superexec``, ``supernode``: the long-lived processes of a deployment."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import bract
from bract.cli.console import say
from bract.errors import BractError
from bract.runtime.pinned import DEFAULT_APP


class Loading(str, Enum):  # noqa: UP042 - the Typer that Flower 1.21 requires knows no other choices
    """When a site imports torch (`bract.runtime.fork_server.Load`)."""

    START = "start"
    MESSAGE = "message"
    EACH = "each"


def default_folder() -> Path:
    """Return the folder of sockets where none is named, below Flower's home."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "sockets"


KitOption = Annotated[
    Path | None,
    typer.Option("--kit", help="Start-up kit of this party, from `bract provision`."),
]


def superlink(
    kit: KitOption = None,
    address: Annotated[
        str, typer.Option("--address", help="host:port where SuperNodes connect.")
    ] = "127.0.0.1:8000",
    sockets: Annotated[
        Path | None, typer.Option("--sockets", help="Folder of the operator's socket, mode 0700.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="TLS certificate, PEM.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its private key, PEM.")] = None,
    ca: Annotated[Path | None, typer.Option("--ca", help="The CA that signed it, PEM.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve without TLS.")] = False,
    authenticate: Annotated[
        bool, typer.Option("--authenticate", help="Only SuperNodes with a registered key.")
    ] = False,
    database: Annotated[
        Path | None, typer.Option("--database", help="SQLite file that survives a restart.")
    ] = None,
    external: Annotated[
        bool,
        typer.Option("--external", help="Leave server apps to `bract superexec`."),
    ] = False,
) -> None:
    """Start a SuperLink that sites reach for training only; runs are submitted on its socket."""
    from bract.runtime.serving import Certificate, start_superlink

    given = [certificate, key, ca]
    if kit is not None:
        if any(given) or insecure or authenticate or database is not None:
            raise BractError(
                "--kit sets everything but --sockets and --external; leave the other options out",
                code="usage",
            )
        from bract.kits.starting import start_superlink_of

        start_superlink_of(kit, sockets, external=external)
    if insecure == any(given) or (any(given) and not all(given)):
        raise BractError("pass --certificate, --key and --ca together, or --insecure", code="usage")
    start_superlink(
        address=address,
        folder=sockets or default_folder(),
        certificate=Certificate(certificate, key, ca) if certificate and key and ca else None,
        authenticate=authenticate,
        database=database,
        external=external,
    )


def _say_whose(folder: Path) -> None:
    """Print what starts here before the imports, which take seconds."""
    from bract.kits.kit import read_kit

    kit = read_kit(folder)
    say(
        f"{kit.name} of the federation {kit.federation}, bract {bract.__version__}: starts, and "
        f"connects to {kit.address}"
    )


def superexec(
    kit: KitOption = None,
    sockets: Annotated[
        Path | None,
        typer.Option("--sockets", help="The SuperLink's socket, such as FOLDER/8000.sock."),
    ] = None,
) -> None:
    """Start server apps for a `bract superlink --external`, also after it was restarted."""
    if kit is not None:
        from bract.kits.starting import start_superexec_of

        start_superexec_of(kit, sockets)
    from bract.runtime.serving import start_superexec

    socket = sockets or default_folder() / "8000.sock"
    if socket.suffix != ".sock":
        socket /= "8000.sock"
    start_superexec(socket)


def supernode(
    kit: KitOption = None,
    superlink: Annotated[
        str | None, typer.Option("--superlink", help="host:port of the SuperLink.")
    ] = None,
    node_config: Annotated[
        str, typer.Option("--node-config", help="Flower's node configuration, 'key=value ...'.")
    ] = "",
    app: Annotated[
        str,
        typer.Option("--app", help="The one ClientApp that runs here, installed on this machine."),
    ] = DEFAULT_APP,
    root_certificates: Annotated[
        Path | None, typer.Option("--root-certificates", help="CA of the SuperLink, PEM.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key that the SuperLink knows.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Connect without TLS.")] = False,
    sockets: Annotated[
        Path | None, typer.Option("--sockets", help="Folder of the site's socket, mode 0700.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="What the socket is named for.")] = 9094,
    health: Annotated[
        bool, typer.Option("--health", help="Answer http://127.0.0.1:PORT/health, nothing else.")
    ] = False,
    load: Annotated[
        Loading | None,
        typer.Option(
            "--load",
            help="Import torch at the start, with the first message, or anew with each.",
            show_default="start, or as site.yaml says",
        ),
    ] = None,
) -> None:
    """Start a SuperNode that runs one installed ClientApp, whatever bundle the server sends."""
    from bract.runtime.serving import start_supernode

    if kit is not None:
        if superlink is not None or root_certificates or key or insecure or node_config:
            raise BractError(
                "--kit sets everything but --sockets, --health and --load; leave the rest out",
                code="usage",
            )
        _say_whose(kit)
        from bract.kits.starting import start_supernode_of

        start_supernode_of(kit, sockets, health=health, load=load.value if load else None)
    if superlink is None:
        raise BractError("pass --kit DIR, or --superlink HOST:PORT", code="usage")
    if insecure == (root_certificates is not None):
        raise BractError("pass --root-certificates, or --insecure", code="usage")
    start_supernode(
        superlink=superlink,
        app=app,
        node_config=node_config,
        folder=sockets or default_folder(),
        port=port,
        root_certificates=root_certificates,
        key=key,
        health=health,
        load=load.value if load else "start",
    )
