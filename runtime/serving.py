"""Start a SuperLink or a SuperNode under the rules, in the place of this process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bract.certificates.validity import (
    check_certificate,
    check_key,
    check_signed,
)
from bract.disk.permissions import make_private_folder, warn_if_open
from bract.errors import BractError, one_line
from bract.runtime import shim, sockets
from bract.runtime.children import command_line
from bract.runtime.flower import NODE_CONFIG
from bract.runtime.fork_server import Load, command_beside
from bract.runtime.pinned import APP, pinned_app

FORK_SOCKET = "fork.sock"
"""The fork server's socket, in the folder of a SuperNode's."""


@dataclass(frozen=True)
class Certificate:
    """Files of a TLS certificate, its private key and the CA that signed it, all PEM."""

    certificate: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Log that it ends soon; refuse one that is expired, foreign or another key's."""
        fix = "renew it: `bract site renew` makes a new one"
        check_certificate(self.certificate, fix=fix)
        check_certificate(self.ca, fix=fix)
        check_signed(self.certificate, self.ca)
        check_key(self.certificate, self.key)

    def options(self) -> list[str]:
        """Return Flower's options for them."""
        return [
            *("--ssl-certfile", str(self.certificate)),
            *("--ssl-keyfile", str(self.key)),
            *("--ssl-ca-certfile", str(self.ca)),
        ]


def start_superlink(
    *,
    address: str,
    folder: Path,
    certificate: Certificate | None,
    authenticate: bool,
    database: Path | None,
    clients_ca: Path | None = None,
    external: bool = False,
) -> NoReturn:
    """Become a SuperLink whose port serves SuperNodes only.

    Parameters
    ----------
    address
        ``host:port`` where SuperNodes connect. The socket ``<port>.sock`` serves the rest.
    folder
        Folder of the socket, of this user alone; made where it is missing.
    certificate
        None serves without TLS.
    authenticate
        Whether a SuperNode must have been registered with its key; needs a certificate.
    database
        SQLite file that survives a restart; None keeps everything in memory.
    clients_ca
        CA that must have signed the certificate of a client of the port: a gateway alone
        has one. None asks for none.
    external
        Whether server apps are started by `start_superexec` in a process of its own, so that they
        outlive this one.

    Raises
    ------
    BractError
        If the certificate has expired, is another CA's or not the key's, or the address cannot be
        listened on.
    """
    if not external:
        _check_captures_folder()
    if certificate is not None:
        certificate.check()
    options = ["--disable-runtime-dependency-installation"]
    options += certificate.options() if certificate else ["--insecure"]
    options += ["--enable-supernode-auth"] if authenticate else []
    options += ["--database", str(database)] if database else []
    options += ["--isolation", "process"] if external else []
    if database is not None:
        warn_if_open(database)
    _check_free(address)
    os.environ[sockets.OPEN] = address
    if clients_ca is not None:
        os.environ[sockets.CLIENTS_CA] = str(clients_ca.absolute())
    _become("flower-superlink", _port(address), folder, options)


def start_superexec(socket: Path) -> NoReturn:
    """Become the process that starts server apps for a SuperLink on this machine.

    It asks the SuperLink's socket for work, and goes on asking while the SuperLink is away.

    Parameters
    ----------
    socket
        The SuperLink's socket, ``FOLDER/8000.sock``, in a folder of this user alone.
    """
    _check_captures_folder()
    folder = socket.parent
    if not folder.is_dir():
        raise BractError(
            f"{folder}: no such folder; --sockets names the folder that `bract superlink` has made",
            code="file-missing",
        )
    os.environ[sockets.FOLDER] = str(folder.absolute())
    if not socket.stem.isdecimal():
        raise BractError(
            f"{socket}: expected a SuperLink's socket, such as 8000.sock", code="usage"
        )
    port = int(socket.stem)
    sockets.path(port)
    command = command_line("flower-superexec", forked=False)
    where = ["--insecure", "--runtime-api-address", sockets.address(port)]
    os.execv(command[0], [*command, *where])


def start_supernode(
    *,
    superlink: str,
    app: str,
    node_config: str,
    folder: Path,
    port: int,
    root_certificates: Path | None,
    key: Path | None,
    health: bool,
    load: Load = "start",
) -> NoReturn:
    """Become a SuperNode that runs one installed ClientApp.

    Parameters
    ----------
    superlink
        ``host:port`` of the SuperLink.
    app
        The ClientApp, ``package.module:name``.
    node_config
        Flower's node configuration, ``key=value`` with spaces between.
    folder
        Folder of the socket, of this user alone; made where it is missing.
    port
        Number in the socket's name.
    root_certificates
        CA of the SuperLink; None connects without TLS.
    key
        Private key with which the SuperNode authenticates; needs TLS.
    health
        Whether ``http://127.0.0.1:<port>/health`` answers, for a container's health check.
    load
        When a process imports torch from which that of each message is forked. With ``each`` there
        is none: every message imports anew.
    """
    if root_certificates is not None:
        check_certificate(root_certificates, fix="ask the server's operator for its new CA")
    options = ["--superlink", superlink]
    options += ["--root-certificates", str(root_certificates)] if root_certificates else []
    options += [] if root_certificates else ["--insecure"]
    options += ["--auth-supernode-private-key", str(key)] if key else []
    os.environ[APP] = app
    pinned_app()
    os.environ[NODE_CONFIG] = node_config
    if health:
        os.environ[sockets.OPEN] = f"127.0.0.1:{port}"
        _check_free(os.environ[sockets.OPEN])
    _become("flower-supernode", port, folder, options, load=load)


def _become(
    name: str, port: int, folder: Path, options: list[str], *, load: Load = "each"
) -> NoReturn:
    make_private_folder(folder, private=True)
    os.environ[sockets.FOLDER] = str(folder.absolute())
    place = sockets.path(port)
    if sockets.is_served(place):
        raise BractError(
            f"{place}: another {name} answers there; end it first, or take another port or folder "
            "(--sockets)",
            code="address-unusable",
        )
    forked = shim.SOCKET in os.environ
    command = command_line(name, forked=forked)
    if load != "each" and not forked:
        fork_socket = place.with_name(FORK_SOCKET)
        os.environ[shim.SOCKET] = str(fork_socket)
        command = command_beside(fork_socket, load, name)
    listening = ["--host", sockets.HOST, "--port", str(port)]
    os.execv(command[0], [*command, *listening, *options])


def _check_captures_folder() -> None:
    """Refuse, before a run does, a folder for captures that cannot be written."""
    from bract.server.capture_folders import usable_captures_folder  # no part of a client's image

    usable_captures_folder()


def _check_free(address: str) -> None:
    """Refuse an address on which a server cannot listen, before anything starts."""
    host, port = address.rpartition(":")[0].strip("[]"), _port(address)
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise BractError(
            f"{address}: cannot be listened on ({one_line(error, 200)}); end what listens "
            "there, or name another address",
            code="address-unusable",
        ) from error


def _port(address: str) -> int:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BractError(
            f"address {address!r}: expected host:port, such as 0.0.0.0:8000", code="usage"
        )
    return int(port)
