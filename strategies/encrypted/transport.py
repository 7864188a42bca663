"""The clients as an encrypted run's server reaches them, in the phases besides training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from bract.protocol.records import Failure

Pair = Callable[
    [Iterable[Message], Iterable[Message]], tuple[list[tuple[int, Message]], list[Failure]]
]
"""Match replies to the nodes that were asked, as `FedAvg.pair` does."""


def unlisted(failures: Iterable[Failure], identities: Mapping[str, bytes], *, listed: bool) -> str:
    """Return which clients the others refused for their identity, and the fix; empty if none.

    Parameters
    ----------
    failures
        What the clients answered.
    identities
        X25519 public keys of the clients in question, by name.
    listed
        Whether ``encryption.identities`` is set.
    """
    reasons = [failure.reason for failure in failures]
    named = [
        f"{client} ({identity.hex()})"
        for client, identity in identities.items()
        if any(f"identity {identity.hex()} is not among the peers" in r for r in reasons)
    ]
    if not named:
        return ""
    fix = (
        "correct the peers of the sites, or encryption.identities"
        if listed
        else "list all sites in encryption.identities: another is then left out, and the rest go on"
    )
    return f"; cause: the sites' peers do not have the identity of {', '.join(named)}; {fix}"


class Transport:
    """The connected nodes, and one phase of messages.

    Parameters
    ----------
    pair
        Matches replies to the nodes that were asked.
    timeout
        Seconds to wait for the answers of a phase.
    busy
        Returns the nodes that still work on a message of a round that has closed.

    Attributes
    ----------
    grid
        Flower's grid; None before the run starts.
    """

    def __init__(self, pair: Pair, timeout: float, busy: Callable[[], set[int]]) -> None:
        self._pair = pair
        self._timeout = timeout
        self._busy = busy
        self.grid: Grid | None = None

    def connected(self) -> set[int]:
        """Return the node ids that are there."""
        assert self.grid is not None
        return set(self.grid.get_node_ids())

    def idle(self) -> set[int]:
        """Return the node ids that are there and can answer at once."""
        return self.connected() - self._busy()

    def send(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages and return the replies that came in time."""
        assert self.grid is not None
        return list(self.grid.send_and_receive(messages, timeout=self._timeout))

    def ask(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, Message], list[Failure]]:
        """Send contents by node id as one message type; return answers by node id, and failures."""
        asked = [
            Message(content, message_type=kind, dst_node_id=node)
            for node, content in contents.items()
        ]
        answers, failures = self._pair(asked, self.send(asked))
        return dict(sorted(answers)), failures
