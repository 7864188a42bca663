"""Masked sums without Flower: parties and a server in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bract.masks.layout import MaskLayout
from bract.masks.party import Dealt, Party
from bract.masks.roster import Roster
from bract.masks.unmasking import Unmasked, rebuild, unmask
from bract.paillier.exchange import Identity, make_identity


@dataclass
class Group:
    """Clients that have shared their seeds for one round."""

    roster: Roster
    parties: dict[int, Party]
    identities: dict[int, Identity]
    dealt: dict[int, Dealt]

    @classmethod
    def of(
        cls,
        weights: Mapping[int, int],
        *,
        threshold: int,
        neighbours: int | None = None,
        number: int = 1,
    ) -> Group:
        """Advertise, deal and open, for clients of these integer weights by node id."""
        parties = {node: Party.begin(node, "run", number) for node in weights}
        identities = {node: make_identity() for node in weights}
        seats = [parties[n].seat(identities[n], w) for n, w in sorted(weights.items())]
        degree = len(seats) - 1 if neighbours is None else neighbours
        roster = Roster("run", number, threshold, degree, tuple(seats))
        dealt = {n: p.deal(roster, identities[n]) for n, p in parties.items()}
        group = cls(roster, parties, identities, dealt)
        for node in parties:
            assert not group.open(node)
        return group

    def open(self, node: int) -> dict[int, str]:
        """Deliver a client its parcels; return what it refused."""
        return self.parties[node].open(
            {n: d.parcels[node] for n, d in self.dealt.items() if n != node and node in d.parcels},
            self.identities[node],
        )

    def keep(self) -> None:
        """Write and read every client's state, as between two messages."""
        self.parties = {n: Party.from_text(p.to_text()) for n, p in self.parties.items()}

    def upload(
        self, layout: MaskLayout, values: Mapping[int, NDArray[np.float64]]
    ) -> dict[int, NDArray[np.uint8]]:
        """Return the masked bytes of each client that answers."""
        found = {}
        for node, own in values.items():
            words, _ = layout.encode(own, self.roster.by_node[node].weight)
            self.parties[node].mask({0: words})
            found[node] = layout.to_bytes(words)
        return found

    def reveal(
        self, survivors: Collection[int], helpers: Collection[int] | None = None, least: int = 2
    ) -> dict[int, dict[int, bytes]]:
        """Let helpers agree on who answered, and reveal their shares."""
        helping = sorted(survivors if helpers is None else helpers)
        sealed = {n: self.parties[n].agree(survivors, self.identities[n], least) for n in helping}
        return {
            n: self.parties[n].reveal(
                {h: b[n] for h, b in sealed.items() if n in b}, self.identities[n]
            )
            for n in helping
        }

    def total(
        self,
        layout: MaskLayout,
        uploads: Mapping[int, NDArray[np.uint8]],
        revealed: Mapping[int, Mapping[int, bytes]],
        task: bytes = b"",
    ) -> tuple[NDArray[np.unsignedinteger], Unmasked]:
        """Return the unmasked sum of weight times code."""
        seeds = rebuild(self.roster, self.dealt, tuple(sorted(uploads)), revealed, task)
        total = np.zeros(layout.length, dtype=layout.dtype)
        for data in uploads.values():
            total += layout.from_bytes(data)
        unmask(total, seeds, 0)
        return layout.reduce(total), seeds


def plain_sum(
    layout: MaskLayout, values: Mapping[int, NDArray[np.float64]], weights: Mapping[int, int]
) -> list[int]:
    """Slow reference: the weighted sum of codes as Python's own integers."""
    total = [0] * layout.length
    for node, own in values.items():
        codes, _ = layout.fixed_point.encode(own)
        total = [t + weights[node] * int(c) for t, c in zip(total, codes, strict=True)]
    return total
