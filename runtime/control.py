"""A client of a SuperLink's Control API, as Flower's own commands make it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bract.errors import BractError
from bract.installed.flower import REQUIREMENT, installed, place
from bract.runtime import sockets
from bract.runtime.rule import BRACT, Rule, hold

if TYPE_CHECKING:
    from bract.installed.flower import SuperLinkConnection

SOCKET = "socket"
"""Name of the connection to a socket."""


def control_client(connection: SuperLinkConnection) -> Any:
    """Return Flower's client for a connection, a context manager."""
    _require()
    from bract.installed.flower import init_http_client_from_connection

    # Flower names the connection; a socket was named by this command.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet if connection.name == SOCKET else output_to_stderr():
        return init_http_client_from_connection(connection)


def socket_connection(socket: Path) -> SuperLinkConnection:
    """Return the connection to a SuperLink's socket, ``FOLDER/8000.sock``."""
    _require()
    from bract.installed.flower import SuperLinkConnection

    os.environ[sockets.FOLDER] = str(socket.absolute().parent)
    port = int(socket.stem)
    sockets.path(port)
    hold(BRACT, (sockets.REQUESTS,))
    return SuperLinkConnection(SOCKET, sockets.address(port), insecure=True)


@contextlib.contextmanager
def output_to_stderr() -> Iterator[None]:
    """Redirect the output of Flower's client, to keep it out of our results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


RULE = Rule(
    name="control client",
    kind="reliability",
    commands=(BRACT,),
    needs=(
        f"{place('SuperLinkConnection')}(name, address, insecure)",
        place("read_superlink_connection"),
        place("init_http_client_from_connection"),
        place("build_fab_from_files"),
        f"{place('StartRunRequest')}(fab, federation, override_federation_config)",
        f"{place('StopRunRequest')}(run_id)",
        f"{place('ListRunsRequest')}(run_id)",
        f"{place('StreamLogsRequest')}(run_id, after_timestamp)",
        place("ListNodesRequest"),
        f"{place('RegisterNodeRequest')}(public_key)",
        f"{place('UnregisterNodeRequest')}(node_id)",
    ),
    does="`bract run`, `follow`, `stop` and `site` ask a SuperLink through the client of `flwr`.",
    without="These commands do not start; `flwr run` submits runs.",
)


def _require() -> None:
    if lacking := RULE.lacking():
        raise BractError(
            f"Flower {installed()} lacks {', '.join(lacking)}, through which bract asks a "
            f"SuperLink; pip install '{REQUIREMENT}', or use `flwr run`",
            code="flower-version",
        )
