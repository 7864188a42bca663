"""A slow, lossy link between two network namespaces, as a process that forwards packets.

    python link.py SERVER_NAMESPACE SITE_NAMESPACE MBIT LOSS MILLISECONDS

Each namespace gets a TUN device; the process reads packets from one and writes them to the other,
each direction with a rate, a queue of `QUEUE` seconds, a delay and independent random loss, as the
kernel's netem would, which not every kernel has. TCP on both sides is the kernel's own. SIGUSR1
cuts the link, and SIGUSR2 restores it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

QUEUE = 0.1
"""Seconds of packets that wait for the link in each direction; what comes then is dropped."""

SERVER, SITE = "10.78.0.1", "10.78.0.2"
_TUNSETIFF, _TUN, _NO_HEADER, _NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_DEVICE = "link0"


@dataclass
class Direction:
    """One direction of a link.

    Parameters
    ----------
    source, target
        Descriptors of the two devices.
    rate
        Bits a second.
    loss
        Share of packets that are lost.
    delay
        Seconds that a packet is under way.
    """

    source: int
    target: int
    rate: float
    loss: float
    delay: float
    chance: random.Random
    cut: bool = False
    _free: float = 0.0
    _under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, now: float) -> None:
        """Read the packets that are there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.add(os.read(self.source, 65536), now)

    def add(self, packet: bytes, now: float) -> None:
        """Take one packet, or drop it."""
        begins = max(now, self._free)
        if self.cut or begins - now > QUEUE:
            return
        # A packet that is lost on the way has taken its time all the same.
        self._free = begins + 8 * len(packet) / self.rate
        if self.chance.random() >= self.loss:
            self._under_way.append((self._free + self.delay, packet))

    def deliver(self, now: float) -> float:
        """Write the packets that have arrived; return seconds until the next one."""
        while self._under_way and self._under_way[0][0] <= now:
            packet = self._under_way.popleft()[1]
            if not self.cut:
                with contextlib.suppress(BlockingIOError):
                    os.write(self.target, packet)
        return self._under_way[0][0] - now if self._under_way else 1.0


@dataclass
class Link:
    """A link that runs; see `link`."""

    process: subprocess.Popen[bytes]

    def cut(self) -> None:
        """Let nothing pass."""
        self.process.send_signal(signal.SIGUSR1)

    def restore(self) -> None:
        """Let packets pass again."""
        self.process.send_signal(signal.SIGUSR2)


@contextlib.contextmanager
def link(
    server: str, site: str, *, megabits: float, loss: float, milliseconds: float
) -> Iterator[Link]:
    """Join two namespaces by a link of ``megabits`` a second and a delay each way.

    The server is `SERVER` and the site `SITE`.
    """
    words = [server, site, str(megabits), str(loss), str(milliseconds)]
    command = [sys.executable, "-ISE", __file__, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the link did not start; it needs root and /dev/net/tun")
        yield Link(process)
    finally:
        process.terminate()
        process.wait()


def device(namespace: str, address: str) -> int:
    """Make a TUN device in a namespace; return its descriptor."""
    with Path("/var/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _TUN | _NO_HEADER))
    for words in (["address", "add", f"{address}/24", "dev"], ["link", "set", "up", "dev"]):
        subprocess.run(["ip", *words, _DEVICE], check=True)
    return descriptor


def forward(directions: tuple[Direction, Direction]) -> None:
    """Forward packets until killed."""
    watched = [direction.source for direction in directions]
    wait = 1.0
    while True:
        ready, _, _ = select.select(watched, [], [], max(0.0, wait))
        now = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(now)
        wait = min(direction.deliver(now) for direction in directions)


def main() -> None:
    """Make the devices and forward."""
    server, site, megabits, loss, milliseconds = sys.argv[1:]
    with contextlib.suppress(OSError):
        os.nice(-10)  # a busy machine must not slow the link
    devices = device(server, SERVER), device(site, SITE)
    rate, lost, delay = 1e6 * float(megabits), float(loss), float(milliseconds) / 1e3
    directions = (
        Direction(devices[0], devices[1], rate, lost, delay, random.Random(0)),
        Direction(devices[1], devices[0], rate, lost, delay, random.Random(1)),
    )

    def switch(number: int, _frame: object) -> None:
        for direction in directions:
            direction.cut = number == signal.SIGUSR1

    signal.signal(signal.SIGUSR1, switch)
    signal.signal(signal.SIGUSR2, switch)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    forward(directions)


if __name__ == "__main__":
    main()
