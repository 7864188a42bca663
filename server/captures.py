"""The captures of a run: an index of what is there, and tensors only when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from bract.errors import BractError, SchemaError
from bract.observation import Observation, ObservationStore, Protocol

_log = logging.getLogger(__name__)

AGGREGATE = "aggregate"
"""Stands for the client where all clients' mean update is attacked as one observation."""


@dataclass(frozen=True)
class Capture:
    """One observation on disk, without its tensors.

    Attributes
    ----------
    folder
        Where the tensors are; None for a round's aggregate, which no client sent.
    members
        The clients whose images it holds, where they are several.
    """

    round: int
    client: str
    protocol: Protocol
    folder: Path | None = None
    members: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """As `Observation.key`."""
        return f"round-{self.round:04d}/{self.client}"


@dataclass(frozen=True)
class Captures:
    """The captures below a folder, by round and client; no tensor is kept in memory.

    Attributes
    ----------
    index
        Every readable description; broken ones were named in a warning.
    """

    root: Path
    index: tuple[Capture, ...] = field(init=False)

    def __post_init__(self) -> None:
        store = ObservationStore(self.root)
        found = []
        for folder in store.folders():
            try:
                described = store.describe(folder)
                found.append(
                    Capture(
                        int(described["round"]),
                        str(described["client"]),
                        Protocol.from_dict(described["protocol"]),
                        folder,
                    )
                )
            except SchemaError:
                raise
            except (BractError, KeyError, TypeError, ValueError) as error:
                _log.warning("skipped: %s: %s", folder, error)
        object.__setattr__(self, "index", tuple(found))

    def load(self, capture: Capture) -> Observation:
        """Read one observation, tensors and all.

        Raises
        ------
        BractError
            If it is broken, or no client's.
        """
        if capture.folder is None:
            raise BractError(f"{capture.key}: no client sent it, so no folder holds it")
        return ObservationStore(self.root).load(capture.folder)

    def of_round(self, number: int) -> list[Capture]:
        """Return one round's captures."""
        return [capture for capture in self.index if capture.round == number]

    def before(self, capture: Capture) -> list[Capture]:
        """Return the earlier captures of the same client, by round."""
        mine = [c for c in self.index if c.client == capture.client and c.round < capture.round]
        return sorted(mine, key=lambda c: c.round)


def select(
    found: Sequence[Capture],
    *,
    rounds: frozenset[int] | None = None,
    clients: frozenset[str] | None = None,
) -> list[Capture]:
    """Return the captures of these rounds and clients; None takes every one.

    A round that is missing beside others that are there is named in a warning.

    Raises
    ------
    BractError
        If a client has no capture at all, or nothing is left.
    """
    names = sorted({capture.client for capture in found})
    numbers = sorted({capture.round for capture in found})
    if strange := sorted((clients or frozenset()) - set(names)):
        only = "; the aggregate belongs to --tier colluding" if AGGREGATE in strange else ""
        raise BractError(
            f"no capture is of client {', '.join(map(repr, strange))}; "
            f"there are {', '.join(names) or 'none'}{only}"
        )
    chosen = [
        c
        for c in found
        if (rounds is None or c.round in rounds) and (clients is None or c.client in clients)
    ]
    if not chosen:
        mend = "was capture.enabled on, and did a round finish?"
        if numbers:
            mend = f"captured were rounds {', '.join(map(str, numbers))}"
        raise BractError(f"no capture to attack among the chosen rounds and clients; {mend}")
    if missing := sorted((rounds or frozenset()) - set(numbers)):
        _log.warning("round %s: not captured", ", ".join(map(str, missing)))
    return chosen


@dataclass(frozen=True)
class Lazy(Sequence[Observation]):
    """Observations that are read when they are reached; iterating holds one at a time.

    Attributes
    ----------
    load
        Reads one.
    """

    captures: Sequence[Capture]
    load: Callable[[Capture], Observation]

    def __len__(self) -> int:
        return len(self.captures)

    @overload
    def __getitem__(self, index: int) -> Observation: ...

    @overload
    def __getitem__(self, index: slice) -> Lazy: ...

    def __getitem__(self, index: int | slice) -> Observation | Lazy:
        if isinstance(index, slice):
            return Lazy(self.captures[index], self.load)
        return self.load(self.captures[index])
