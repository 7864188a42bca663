"""The clients of one masked sum, their keys and weights, and who is whose neighbour."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from bract.crypto.x25519 import key_problem
from bract.masks.errors import MaskError

_LARGEST = 1 << 63
"""Above every node id (of either sign), weight, round and threshold."""


@dataclass(frozen=True)
class Seat:
    """One client of a masked sum, as every other one sees it.

    Attributes:
        node: Its node id.
        identity: Its X25519 public key, of its site or of the run, which its boxes prove.
        box_key: X25519 public key of the round, for which shares are sealed.
        mask_key: X25519 public key of the round, from which pairwise masks are agreed.
        weight: Its integer weight.
    """

    node: int
    identity: bytes
    box_key: bytes
    mask_key: bytes
    weight: int


@dataclass(frozen=True)
class Roster:
    """What all clients of one masked sum must agree on.

    Its digest is in the derivation of every mask and in the context of every box: clients that the
    server gave different rosters cannot open each other's boxes, and find it out before they mask.

    Attributes:
        session: Identity of the run, a digest of all that its clients must agree on.
        number: The round.
        threshold: How many holders of shares give a seed, ``t``.
        neighbours: With how many others a client shares masks; at least as many as there are
            others is all of them.
        seats: By node id.
    """

    session: str
    number: int
    threshold: int
    neighbours: int
    seats: tuple[Seat, ...]

    def __post_init__(self) -> None:
        nodes = [seat.node for seat in self.seats]
        if nodes != sorted(set(nodes)):
            raise MaskError("the clients of the sum are not in order, or one is named twice")
        for name in ("identity", "box_key", "mask_key"):
            keys: dict[bytes, int] = {}
            for seat in self.seats:
                key, what = getattr(seat, name), name.replace("_", " ")
                problem = key_problem(key)
                if problem is not None:
                    raise MaskError(
                        f"client {seat.node} of the sum has no usable {what}: {problem}"
                    )
                if key in keys:
                    raise MaskError(
                        f"clients {keys[key]} and {seat.node} of the sum have one {what}; one site "
                        "counts once"
                    )
                keys[key] = seat.node
        if any(not 1 <= seat.weight < _LARGEST for seat in self.seats):
            raise MaskError("a client of the sum has no positive weight, or too large a one")
        numbers = (self.number, self.threshold, self.neighbours)
        if any(not 0 <= n < _LARGEST for n in numbers) or any(abs(n) >> 64 for n in nodes):
            raise MaskError("a round, threshold, number of neighbours or node id is out of range")
        if not 2 <= self.threshold <= min(self.neighbours, len(nodes) - 1) + 1:
            raise MaskError(
                f"{len(nodes)} clients are too few for a threshold of {self.threshold}: "
                f"{min(self.neighbours, len(nodes) - 1) + 1} hold shares of a seed"
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all of it."""
        found = hashlib.sha256(b"bract masked sum 1")
        session = self.session.encode()
        found.update(len(session).to_bytes(4, "big") + session)
        for number in (self.number, self.threshold, self.neighbours, len(self.seats)):
            found.update(number.to_bytes(8, "big"))
        for seat in self.seats:
            found.update(seat.node.to_bytes(16, "big", signed=True))
            found.update(seat.identity + seat.box_key + seat.mask_key)
            found.update(seat.weight.to_bytes(8, "big"))
        return found.digest()

    @cached_property
    def by_node(self) -> dict[int, Seat]:
        """Each client's seat."""
        return {seat.node: seat for seat in self.seats}

    @property
    def weight(self) -> int:
        """Sum of the weights."""
        return sum(seat.weight for seat in self.seats)

    def neighbours_of(self, node: int) -> tuple[int, ...]:
        """Return with whom a client shares masks and seeds: the nearest on a ring.

        The ring's order is a hash of all keys of the round: no client chooses its neighbours. A
        server that breaks the protocol can try rosters until it likes one.
        """
        ring, position = self._ring
        own, half = position[node], self._degree // 2
        around = (ring[(own + step) % len(ring)] for step in range(-half, half + 1) if step)
        return tuple(sorted(set(around) - {node}))

    def connected(self, node: int, named: Collection[int]) -> set[int]:
        """Return whom of ``named`` masks connect with one of them, itself included."""
        found, new = {node}, [node]
        while new:
            near = set(self.neighbours_of(new.pop())) & set(named) - found
            found |= near
            new += near
        return found

    def holders_of(self, node: int) -> tuple[int, ...]:
        """Return who holds shares of a client's seeds: its neighbours and itself, in order."""
        return tuple(sorted({*self.neighbours_of(node), node}))

    @property
    def _degree(self) -> int:
        others = len(self.seats) - 1
        # All others: half a ring in each direction, rounded up.
        return 2 * math.ceil(others / 2) if self.neighbours >= others else self.neighbours

    @cached_property
    def _ring(self) -> tuple[list[int], dict[int, int]]:
        def place(seat: Seat) -> bytes:
            return hashlib.sha256(b"ring" + self.digest + seat.mask_key).digest()

        ring = [seat.node for seat in sorted(self.seats, key=place)]
        return ring, {node: position for position, node in enumerate(ring)}


def usual_neighbours(clients: int) -> int:
    """Return how many neighbours a client has where none are configured.

    All others up to 50 clients, and from there on 5 log2(clients), rounded up to an even number.
    """
    return clients - 1 if clients <= 50 else 2 * math.ceil(2.5 * math.log2(clients))


def usual_threshold(clients: int, neighbours: int, *, consistency: bool) -> int:
    """Return the threshold where none is configured.

    Where all are neighbours two thirds, rounded up: a third may drop out, and a server that names
    other survivors to some than to others finds ``t`` helpers for one list only, where fewer than
    a third of the clients help it (Bonawitz et al. 2017, section 6.2). Of fewer neighbours the
    smallest majority, which no two lists can have, or two fifths without ``consistency``.
    """
    holders = min(neighbours, clients - 1) + 1
    if holders == clients:
        return max(2, -(-2 * holders // 3))
    return holders // 2 + 1 if consistency else max(2, -(-2 * holders // 5))


def lost_odds(clients: int, neighbours: int, threshold: int, dropped: int) -> float:
    """Return a bound on the probability that dropouts leave some seed fewer than ``t`` holders.

    The sum over all clients of the chance that, of ``dropped`` clients drawn at random, too many
    are among its holders (hypergeometric).
    """
    holders, stay = min(neighbours, clients - 1) + 1, clients - dropped
    few = sum(
        math.comb(stay, alive) * math.comb(dropped, holders - alive)
        for alive in range(max(0, holders - dropped), min(threshold, stay + 1))
        if holders - alive >= 0
    )
    return min(1.0, clients * few / math.comb(clients, holders))
