"""A client of a SuperLink's Control API, as Flower's own commands make it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bract.deploy import sockets
from bract.deploy.rules import check_version

if TYPE_CHECKING:
    from bract.flower import SuperLinkConnection

SOCKET = "socket"
"""Name of the connection to a socket."""


def control_client(connection: SuperLinkConnection) -> Any:
    """Return Flower's client for a connection, a context manager."""
    check_version()
    from bract.flower import init_http_client_from_connection

    # Flower names the connection; a socket was named by this command.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet if connection.name == SOCKET else output_to_stderr():
        return init_http_client_from_connection(connection)


def socket_connection(socket: Path) -> SuperLinkConnection:
    """Return the connection to a SuperLink's socket, ``FOLDER/8000.sock``."""
    from bract.flower import SuperLinkConnection

    os.environ[sockets.FOLDER] = str(socket.absolute().parent)
    port = int(socket.stem)
    sockets.path(port)
    sockets.route_requests()
    return SuperLinkConnection(SOCKET, sockets.address(port), insecure=True)


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Redirect the output of Flower's client, to keep it out of our results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
