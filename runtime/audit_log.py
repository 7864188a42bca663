"""Audit log of a SuperLink: one line of JSON for each request that changes something.

The Control API is served on a Unix socket, so the kernel names the user who asks (``SO_PEERCRED``).
Every such request is written down twice: before the SuperLink sees it, with digests of what was
submitted, and with the outcome. Where the first line cannot be written the request is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import logging
import os
import pwd
import socket
import struct
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from bract.disk.permissions import open_private
from bract.errors import one_line
from bract.installed.flower import place
from bract.runtime.pinned import RefusedAppError, manifest_of
from bract.runtime.rule import Layer, Rule
from bract.runtime.sockets import FOLDER

AUDIT_LOG = "BRACT_AUDIT_LOG"
"""Environment variable of a SuperLink with the file that the lines are appended to."""

_ACTIONS = {
    "/v1/control/start-run": "StartRunRequest",
    "/v1/control/stop-run": "StopRunRequest",
    "/v1/control/register-node": "RegisterNodeRequest",
    "/v1/control/unregister-node": "UnregisterNodeRequest",
}
"""Requests that are written down, and which of Flower's messages they carry."""

_REFUSED = frozenset(
    f"/v1/{api}/{action}"
    for api in ("control", "runtime")
    for action in ("start-automation", "stop-automation")
)
"""Requests that would start runs later, inside the SuperLink, where no line could name the user."""

_LARGEST = 64 << 20
"""Bytes of the largest request that is passed on; Flower's bundles have at most 10 MB."""

_PEER = "bract.peer"

_log = logging.getLogger(__name__)


class AuditLog:
    """Pass an ASGI app's requests on, and append those of `_ACTIONS` to a file (mode 0600)."""

    def __init__(self, app: Any, path: Path) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request."""
        path = scope.get("path")
        if path in _REFUSED:
            await _refuse(send, 403)
            return
        if scope["type"] != "http" or path not in _ACTIONS:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        action = path.rpartition("/")[2]
        asked = {"id": uuid.uuid4().hex[:16], "action": action, **_peer_of(scope)}
        if body is None:
            await _refuse(send, 413)
            return
        try:
            self._append({**asked, "event": "asked", **_submitted(action, path, body)})
        except OSError as error:
            _log.error("%s: %s; the request is refused", self._path, one_line(error, 300))
            await _refuse(send, 503)
            return
        status, answer = 500, b""

        async def again() -> dict[str, Any]:
            nonlocal body
            if body is None:
                return dict(await receive())
            given, body = body, None
            return {"type": "http.request", "body": given, "more_body": False}

        async def keep(message: dict[str, Any]) -> None:
            nonlocal status, answer
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                answer += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, again, keep)
        finally:
            with contextlib.suppress(OSError):  # the line before records the request
                self._append({**asked, "event": "answered", **_outcome(path, status, answer)})

    def _append(self, line: dict[str, Any]) -> None:
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        text = json.dumps({"time": time, **line}) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = open_private(self._path, flags, private=True)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _audited(startup: Callable[..., Awaitable[None]], path: Path) -> Callable[..., Any]:
    """Have uvicorn, which serves on a Unix socket, log requests to a file."""

    async def start(server: Any, sockets: Any = None) -> None:
        config = server.config
        config.loaded_app = AuditLog(config.loaded_app, path)
        config.http_protocol_class = _naming_peers(config.http_protocol_class)
        await startup(server, sockets=sockets)

    return start


def _put(_: str) -> Mapping[str, Layer]:
    if not (os.environ.get(AUDIT_LOG) and FOLDER in os.environ):
        return {}
    path = Path(os.environ[AUDIT_LOG])
    return {_STARTED: lambda startup: _audited(startup, path)}


_STARTED = "uvicorn:Server.startup"

RULE = Rule(
    name="audit log",
    kind="security",
    commands=("flower-superlink",),
    needs=(
        f"{_STARTED}(sockets)",
        f"{place('StartRunRequest')}(fab, app_spec, override_config)",
        f"{place('StartRunResponse')}(run_id)",
        f"{place('StopRunRequest')}(run_id)",
        f"{place('RegisterNodeRequest')}(name, public_key)",
        f"{place('UnregisterNodeRequest')}(node_id)",
    ),
    does="The SuperLink of a kit records which user submits which run, with digests of it.",
    without="no line would name the user who submitted a run",
    put=_put,
)


def _naming_peers(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return uvicorn's class of connections, with the user at the other end in each request."""

    class Named(protocol):  # type: ignore[misc, valid-type]
        app_state: dict[str, Any]

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            pid, uid = _credentials(transport.get_extra_info("socket"))
            self.app_state = {**self.app_state, _PEER: {"uid": uid, "pid": pid}}

    return Named


def _credentials(connection: Any) -> tuple[int, int]:
    form = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    pid, uid, _ = form.unpack(found)
    return pid, uid


def _peer_of(scope: Any) -> dict[str, Any]:
    peer = dict(scope.get("state", {}).get(_PEER, {}))
    with contextlib.suppress(KeyError):
        peer["user"] = pwd.getpwuid(peer["uid"]).pw_name
    return peer


def _submitted(action: str, path: str, body: bytes) -> dict[str, Any]:
    """Return what a request names: digests of a run's bundle and configuration, a run, a node."""
    request = _parsed(_ACTIONS[path], body)
    if request is None:
        return {"problem": "no such request"}
    if action == "start-run":
        bundle = request.fab.content
        return {
            "bundle": hashlib.sha256(bundle).hexdigest(),
            "app": one_line(request.app_spec, 100) or None,
            "configuration": _configuration(bundle, dict(request.override_config)),
        }
    if action == "register-node":
        return {
            "name": one_line(request.name, 100),
            "key": hashlib.sha256(request.public_key).hexdigest(),
        }
    return {"run_id": request.run_id} if action == "stop-run" else {"node_id": request.node_id}


def _configuration(bundle: bytes, overrides: dict[str, Any]) -> str | None:
    """Return the SHA-256 of a bundle's configuration and what was laid over it."""
    try:
        content = manifest_of(bundle)["tool"]["flwr"]["app"]["config"]
        over = {key: value.SerializeToString().hex() for key, value in overrides.items()}
        text = json.dumps([content, over], sort_keys=True, default=str)
    except (RefusedAppError, LookupError, TypeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _outcome(path: str, status: int, answer: bytes) -> dict[str, Any]:
    if status != 200 or not path.endswith("/start-run"):
        return {"status": status}
    found = _parsed("StartRunResponse", answer)
    return {"status": status, "run_id": None if found is None else found.run_id}


def _parsed(name: str, content: bytes) -> Any:
    from google.protobuf.message import DecodeError

    from bract.installed import flower

    message = getattr(flower, name)()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return None
    return message


async def _whole(receive: Any) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > _LARGEST:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(send: Any, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
