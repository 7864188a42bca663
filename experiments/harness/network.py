"""Network namespaces on this machine: a server's and one for each site, joined by a bridge.

A process of a site reaches the server's address alone, over a TCP stack of its own. Making
namespaces needs root and iproute2; without them `network` gives the loopback interface, and says
so in `Network.kind`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

LOOPBACK, NAMESPACES = "loopback", "namespaces"
_SUBNET = "10.77"


@dataclass
class Network:
    """A server and sites; see `network`.

    Attributes
    ----------
    kind
        `NAMESPACES`, or `LOOPBACK` where namespaces cannot be made.
    server
        The server's IP address.
    """

    kind: str
    server: str
    _hub: str = ""
    _made: list[str] = field(default_factory=list)

    def in_server(self, command: list[str]) -> list[str]:
        """Return a command line that runs at the server."""
        return _inside(self._hub, command)

    def in_site(self, number: int, command: list[str]) -> list[str]:
        """Return a command line that runs at a site, whose namespace is made where it lacks."""
        if self.kind == LOOPBACK:
            return command
        name = f"{self._hub}-{number}"
        if name not in self._made:
            self._add_site(name, number)
        return _inside(name, command)

    def _add_site(self, name: str, number: int) -> None:
        self._made.append(name)
        _ip("netns", "add", name)
        ours, theirs = f"s{number}", "eth0"
        peer = ("type", "veth", "peer", "name", theirs, "netns", name)
        _ip("-n", self._hub, "link", "add", ours, *peer)
        _ip("-n", self._hub, "link", "set", ours, "master", "br0", "up")
        host = number + 2
        address = f"{_SUBNET}.{host // 256}.{host % 256}/16"
        _ip("-n", name, "address", "add", address, "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        _ip("-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Make the server's namespace; remove all of them in the end.

    Processes inside must have ended by then.
    """
    if os.geteuid() or shutil.which("ip") is None:
        yield Network(LOOPBACK, "127.0.0.1")
        return
    hub = f"bract{uuid.uuid4().hex[:6]}"
    made = Network(NAMESPACES, f"{_SUBNET}.0.1", hub, [hub])
    _ip("netns", "add", hub)
    try:
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "address", "add", f"{made.server}/16", "dev", "br0")
        for device in ("br0", "lo"):
            _ip("-n", hub, "link", "set", device, "up")
        yield made
    finally:
        for name in reversed(made._made):
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _inside(name: str, command: list[str]) -> list[str]:
    return ["ip", "netns", "exec", name, *command] if name else command


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
