"""Masked sums: processor time, bytes and dropouts, from keys to the unmasked sum.

    python -m experiments.masks [--values 11181642] [--json]

Every sum is held against the plain sum of the quantised updates, to the bit. ``ns a pair`` is the
time of one neighbour's mask a value; ``client s`` is one client's share of the processor time of
all clients, from keys to the last share, quantising among it; ``server s`` is the server's.
``MB a client`` is its masked update, ``KB of keys`` what else it sends in a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from bract.masks.keystream import add_mask
from bract.masks.layout import MaskLayout
from bract.masks.party import Dealt, Party
from bract.masks.roster import Roster, usual_neighbours, usual_threshold
from bract.masks.unmasking import rebuild, unmask
from bract.paillier.exchange import make_identity
from experiments.harness.command import emit, note, parser

COLUMNS = [
    "setup", "clients", "dropped", "neighbours", "threshold", "values", "bytes a value",
    "MB a client", "KB of keys", "ns a pair", "client s", "server s",
]  # fmt: skip
RESNET_18 = 11_181_642
LENET = 61_706
_T = TypeVar("_T")


class Clock:
    """Adds up processor time by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[], _T]) -> _T:
        """Run ``work`` and count it."""
        started = time.process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - started
        return result


def updates(values: int, client: int) -> np.typing.NDArray[np.float32]:
    """Return one client's update."""
    drawn = np.random.default_rng(client).standard_normal(values, dtype=np.float32)
    return drawn * np.float32(0.03)


def measure(
    setup: str, clients: int, values: int, *, dropped: int = 0, consistency: bool = True
) -> dict[str, Any]:
    """Run one sum and return its row."""
    layout = MaskLayout(values, 0.1, 16, max(31, clients))
    neighbours = usual_neighbours(clients)
    threshold = usual_threshold(clients, neighbours, consistency=consistency)
    clock, weights = Clock(), {n: 1 + (n % 3 if clients < 16 else 0) for n in range(clients)}
    identities = {n: make_identity() for n in weights}
    parties = {n: clock.timed("client", partial(Party.begin, n, "run", 1)) for n in weights}
    seats = [parties[n].seat(identities[n], w) for n, w in weights.items()]
    roster = Roster("run", 1, threshold, neighbours, tuple(seats))
    dealt: dict[int, Dealt] = {
        n: clock.timed("client", partial(parties[n].deal, roster, identities[n])) for n in weights
    }
    keys = 96 + sum(len(p.box) + 64 for p in dealt[0].parcels.values())
    for n in weights:
        others = roster.neighbours_of(n)
        mine = {o: dealt[o].parcels[n] for o in others}
        if clock.timed("client", partial(parties[n].open, mine, identities[n])):
            raise SystemExit("an honest client's shares were refused")
    order = np.random.default_rng(7).permutation(clients)
    survivors = tuple(sorted(order[dropped:].tolist()))
    total = np.zeros(values, dtype=layout.dtype)
    plain = np.zeros(values, dtype=np.uint64)
    for n in survivors:
        update = updates(values, n)

        def upload(n: int = n, update: Any = update) -> Any:
            words, _ = layout.encode(update, weights[n])
            parties[n].mask({0: words})
            return layout.to_bytes(words)

        sent = clock.timed("client", upload)
        codes, _ = layout.fixed_point.encode(update)
        plain += codes * np.uint64(weights[n])

        def add(sent: Any = sent) -> None:
            np.add(total, layout.from_bytes(sent), out=total)

        clock.timed("server", add)
    sealed = {
        n: clock.timed("client", partial(parties[n].agree, survivors, identities[n], 2))
        for n in survivors
    }
    boxes = {n: {h: b[n] for h, b in sealed.items() if n in b} for n in survivors}
    revealed = {
        n: clock.timed(
            "client", partial(parties[n].reveal, boxes[n] if consistency else None, identities[n])
        )
        for n in survivors
    }
    keys += sum(map(len, sealed[survivors[0]].values()))
    keys += sum(map(len, revealed[survivors[0]].values()))
    seeds = clock.timed("server", lambda: rebuild(roster, dealt, survivors, revealed))
    clock.timed("server", lambda: unmask(total, seeds, 0))
    if not np.array_equal(layout.reduce(total), plain.astype(layout.dtype)):
        raise SystemExit("the unmasked sum is not the plain one")
    row = {
        "setup": setup,
        "clients": clients,
        "dropped": dropped,
        "neighbours": neighbours,
        "threshold": threshold,
        "values": values,
        "bytes a value": layout.word_bytes,
        "MB a client": round(layout.nbytes / 1e6, 3),
        "KB of keys": round(keys / 1e3, 1),
        "ns a pair": round(pair(values), 2),
        "client s": round(clock.seconds["client"] / len(survivors), 3),
        "server s": round(clock.seconds["server"], 3),
    }
    note(f"{setup}, {dropped} dropped: {row['client s']} s a client, {row['server s']} s server")
    return row


def pair(values: int) -> float:
    """Return the nanoseconds a value of one mask: the least of three."""
    words = np.zeros(values, dtype=np.uint32)
    found = []
    for _ in range(3):
        started = time.process_time()
        add_mask(words, bytes(32), 0)
        found.append(time.process_time() - started)
    return min(found) / values * 1e9


def main() -> None:
    """Measure, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--values", type=int, default=RESNET_18)
    options = arguments.parse_args()
    rows = [
        measure("LeNet", 3, LENET),
        measure("LeNet", 3, LENET, dropped=1),
        measure("ResNet-18", 8, options.values),
        measure("ResNet-18", 8, options.values, dropped=2),
        measure("LeNet", 100, LENET, consistency=False),
        measure("LeNet", 100, LENET, dropped=33, consistency=False),
    ]
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
