"""Unix sockets in the place of Flower's TCP ports.

Flower's Control, Fleet and Runtime APIs ask for no password, and a client that reaches their port
may submit code. On a Unix socket in a folder of mode 0700 the kernel answers for who connects: the
user who started the federation, and root.

The host name `HOST` represents the sockets: ``socket.invalid:8000`` is ``8000.sock`` in the folder
that the environment variable `FOLDER` names. A name below ``.invalid`` belongs to no host (RFC
6761), so where a rule of this module is missing nothing listens and nothing connects.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import resource
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from bract.errors import BractError, one_line
from bract.installed.flower import CLIENT
from bract.runtime.rule import ALL, BRACT, Layer, Rule

FOLDER = "BRACT_SOCKETS"
"""Environment variable that names the folder of the sockets."""

HOST = "socket.invalid"
"""Host of an address that represents a socket."""

OPEN = "BRACT_OPEN"
"""Environment variable with ``host:port`` where a part of the APIs is served on TCP besides."""

CLIENTS_CA = "BRACT_CLIENTS_CA"
"""Environment variable with the file of the CA that must have signed the certificate of a client
of the address in `OPEN`."""

LONGEST_PATH = 107
"""Bytes of the longest path that a Unix socket can have."""

MOST_FILES = 1 << 16
"""Open files that a SuperLink may have, where the system allows as many."""

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


def address(port: int) -> str:
    """Return the address that Flower is given for a socket."""
    return f"{HOST}:{port}"


def path(port: int) -> Path:
    """Return the socket that represents a port."""
    folder = Path(os.environ[FOLDER]).resolve()
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid() or mode & 0o077:
        raise BractError(
            f"{folder}: belongs to user {found.st_uid} with mode {mode:04o}; "
            f"the folder of sockets must be user {os.getuid()}'s with mode 0700: "
            f"chmod 700 {folder}",
            code="address-unusable",
        )
    return folder / f"{port}.sock"


def listener(port: int) -> socket.socket:
    """Bind a socket that this user alone may connect to, in the place of an earlier one."""
    place = path(port)
    place.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(place))
    except OSError as error:
        raise BractError(
            f"{place}: cannot be made a socket ({one_line(error)}); a path of at most "
            f"{LONGEST_PATH} bytes can, so name a folder with a shorter one",
            code="address-unusable",
        ) from error
    # Before listen() no client can connect.
    place.chmod(0o600)
    return bound


def is_served(place: Path) -> bool:
    """Return whether any process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(2)
        try:
            knock.connect(str(place))
        except OSError:
            return False
    return True


def is_healthy(place: Path) -> bool:
    """Return whether a SuperLink or SuperNode answers on a socket."""
    connection = http.client.HTTPConnection("localhost", timeout=2)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(2)
    try:
        connection.sock.connect(str(place))
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class OnlyPaths:
    """Answer 404 but for some paths; a path that ends in a slash represents all below it."""

    def __init__(self, app: Asgi, paths: tuple[str, ...]) -> None:
        self._app = app
        self._exact = tuple(path for path in paths if not path.endswith("/"))
        self._below = tuple(path for path in paths if path.endswith("/"))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request."""
        if scope["type"] != "http":
            raise BractError(f"{scope['type']} is not served here", code="request-refused")
        path = str(scope["path"])
        if path in self._exact or (path.startswith(self._below) and self._below):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})


OPEN_PATHS = {
    # What a SuperNode needs of the SuperLink; submitting runs and starting apps stay on the socket.
    "flower-superlink": ("/health", "/v1/fleet/"),
    "flower-supernode": ("/health",),
}


def _served(startup: Callable[..., Awaitable[None]], paths: tuple[str, ...]) -> Callable[..., Any]:
    """Make uvicorn, which serves Flower's APIs, listen on a socket where `HOST` is the host.

    Where the environment names an address in `OPEN`, ``paths`` alone are served there, with the
    certificate that Flower was given.
    """
    import uvicorn

    async def start(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        config = server.config
        if config.host != HOST or sockets is not None:
            raise BractError(
                f"asked to listen on {config.host}:{config.port}; expected {HOST}",
                code="address-unusable",
            )
        certified, config.ssl = config.ssl, None
        await startup(server, sockets=[listener(config.port)])
        if server.started and os.environ.get(OPEN):
            host, _, port = os.environ[OPEN].rpartition(":")
            if os.environ.get(CLIENTS_CA):
                _admit_signed_only(certified, os.environ[CLIENTS_CA])
            part = uvicorn.Config(
                OnlyPaths(config.loaded_app, paths), lifespan="off", log_config=None
            )
            part.load()

            def protocol() -> asyncio.Protocol:
                made: asyncio.Protocol = part.http_protocol_class(  # type: ignore[call-arg]
                    config=part,
                    server_state=server.server_state,
                    app_state=server.lifespan.state,
                )
                return made

            loop = asyncio.get_running_loop()
            server.servers.append(
                await loop.create_server(protocol, host.strip("[]"), int(port), ssl=certified)
            )

    return start


def _admit_signed_only(context: ssl.SSLContext | None, ca: str) -> None:
    """Have a server ask for a certificate that a CA signed for a client."""
    if context is None:
        raise BractError(
            f"{CLIENTS_CA} is set, and no certificate is served: pass --certificate",
            code="config-conflict",
        )
    context.load_verify_locations(cafile=ca)
    context.verify_mode = ssl.CERT_REQUIRED


def allow_many_connections() -> None:
    """Raise this process's limit of open files, one a connection, to `MOST_FILES`.

    Service managers and login shells give 1024, fewer than the connections of a thousand sites.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _routed(construct: Callable[..., None]) -> Callable[..., None]:
    """Make Flower's HTTP client connect to a socket where `HOST` is the host."""
    import httpx

    def init(client: Any, base_url: str, **options: Any) -> None:
        url = httpx.URL(base_url)
        if url.host != HOST:
            construct(client, base_url, **options)
            return
        # The kernel answers for both ends of a socket; TLS on it would prove nothing more.
        plain = str(url.copy_with(scheme="http"))
        construct(client, plain, **(options | {"verify": False}))
        timeout = client._client.timeout
        client._client.close()
        # Reading the CAs of the web, which no socket needs, takes 20 ms of every process.
        transport = httpx.HTTPTransport(uds=str(path(url.port or 0)), verify=False)
        client._client = httpx.Client(transport=transport, timeout=timeout)

    return init


def intercepted(*interceptors: Any) -> Layer:
    """Return a layer that puts interceptors around those of Flower's HTTP clients.

    The first is the outermost, and so are those of rules that come before.
    """

    def layer(construct: Callable[..., None]) -> Callable[..., None]:
        def init(client: Any, base_url: str, **options: Any) -> None:
            inner = tuple(options.pop("interceptors", ()))
            construct(client, base_url, interceptors=(*interceptors, *inner), **options)

        return init

    return layer


CONSTRUCTED = f"{CLIENT}.__init__"
_STARTED = "uvicorn:Server.startup"


def _put_requests(_: str) -> Mapping[str, Layer]:
    return {CONSTRUCTED: _routed} if FOLDER in os.environ else {}


def _put_servers(name: str) -> Mapping[str, Layer]:
    if FOLDER not in os.environ:
        return {}
    return {_STARTED: lambda startup: _served(startup, OPEN_PATHS[name])}


REQUESTS = Rule(
    name="requests to sockets",
    kind="security",
    commands=(*ALL, BRACT),
    needs=(f"{CONSTRUCTED}(base_url, interceptors, verify)", f"{CLIENT}._client"),
    does="Flower's clients connect to Unix sockets, where the kernel answers for who connects.",
    without="Flower's APIs would have to be on TCP, where they ask for no password",
    put=_put_requests,
)

SERVERS = Rule(
    name="servers on sockets",
    kind="security",
    commands=tuple(OPEN_PATHS),
    needs=(f"{_STARTED}(sockets)",),
    does="Flower's servers listen on Unix sockets; what other machines need of them is served "
    "besides, and nothing else.",
    without="every user of the machine could submit code",
    after=("audit log",),
    put=_put_servers,
)
