"""Register at a running SuperLink, on its operator's socket, the sites that may connect."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from bract.errors import BractError, RunFailedError, one_line
from bract.kits.sites import Sites
from bract.runtime import sockets
from bract.runtime.control import control_client, socket_connection


@dataclass
class Registered:
    """What changed at the SuperLink, names of sites; ``unknown`` are keys of no site."""

    added: list[str] = field(default_factory=list)
    there: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def register(sites: Sites, socket: Path) -> Registered:
    """Register every active site's key, and remove every revoked one.

    Parameters
    ----------
    socket
        The SuperLink's socket, such as ``FOLDER/8000.sock``.

    Raises
    ------
    BractError
        If nothing answers there, or the folder is not this user's alone.
    RunFailedError
        If the SuperLink refuses a key.
    """
    import httpx

    from bract.installed.flower import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest

    wanted = {_key_bytes(site.public_key): name for name, site in sites.active.items()}
    revoked = {_key_bytes(key) for key in sites.revoked_keys}
    done = Registered()
    with _control(socket) as client:
        try:
            known = {
                node.public_key: node
                for node in client.ListNodes(ListNodesRequest()).nodes_info
                if node.status != _UNREGISTERED
            }
            for key, node in known.items():
                if key in revoked:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
                    done.removed.append(node.name or str(node.node_id))
                elif key not in wanted:
                    done.unknown.append(node.name or str(node.node_id))
            for key, name in wanted.items():
                if key in known:
                    done.there.append(name)
                    continue
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                done.added.append(name)
        except httpx.HTTPStatusError as error:
            raise RunFailedError(
                f"{socket}: the SuperLink refused: {one_line(error.response.text, 300)}; a key "
                "that was shut out once is never taken again: add the site under a new key"
            ) from error
        except httpx.HTTPError as error:
            raise RunFailedError(
                f"{socket}: {one_line(error, 300)}", code="superlink-unreachable"
            ) from error
    return done


def online(socket: Path) -> dict[str, bool]:
    """Return whether each registered site is connected, by name.

    Raises
    ------
    BractError
        If nothing answers there.
    RunFailedError
        If the SuperLink's answer is an error.
    """
    import httpx

    from bract.installed.flower import ListNodesRequest

    with _control(socket) as client:
        try:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.HTTPError as error:
            raise RunFailedError(
                f"{socket}: {one_line(error, 300)}", code="superlink-unreachable"
            ) from error
    return {
        node.name or str(node.node_id): node.status == _ONLINE
        for node in nodes
        if node.status != _UNREGISTERED
    }


_ONLINE, _UNREGISTERED = "online", "unregistered"


def _control(socket: Path) -> Any:
    _require(socket)
    return control_client(socket_connection(socket))


def _require(socket: Path) -> None:
    if not socket.stem.isdecimal() or socket.suffix != ".sock":
        raise BractError(
            f"{socket}: expected the socket of a `bract superlink`, such as 8000.sock", code="usage"
        )
    if not sockets.is_served(socket):
        raise BractError(
            f"{socket}: no SuperLink answers there, or this user may not ask it; start it first "
            "(`bract superlink --kit DIR`), and register as the user who started it",
            code="superlink-unreachable",
        )


def _key_bytes(text: str) -> bytes:
    """Return a public key as Flower's requests carry it."""
    key = serialization.load_ssh_public_key(text.encode())
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
