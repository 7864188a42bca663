"""When a phase closes: once a quorum has answered and a grace has passed, or at its deadline.

An answer that comes later is taken from the SuperLink, named and thrown away. It is never read, so
it cannot enter another round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from bract.config.sections import answers_needed
from bract.errors import BractError, one_line
from bract.process.timeline import span
from bract.protocol.fused import FUSED_TYPE
from bract.strategies.polling import ForwardingGrid, collect

GRACE = 5.0

_CLOSED_EARLY = {MessageType.TRAIN: "update", FUSED_TYPE: "validation scores"}
"""Message types whose phases a quorum closes, and what their answers hold."""


@dataclass(frozen=True)
class Late:
    """An answer that came after its phase had closed, and was refused.

    Attributes
    ----------
    node_id
        The node that was asked.
    server_round
        The round that it was asked in.
    reason
        What came.
    """

    node_id: int
    server_round: int
    reason: str


@dataclass(frozen=True)
class _Outstanding:
    node_id: int
    server_round: int
    holds: str
    until: float


class Closing:
    """Rule by which the phases of training and validation close.

    Parameters
    ----------
    quorum
        Share of the clients asked (a float in (0, 1]) or number of them (an int) whose answers
        close a phase; see `usual`; None waits for all, until the deadline.
    grace
        Seconds that the others still have then.

    Raises
    ------
    BractError
        If either is out of range.

    Attributes
    ----------
    usual
        How many clients a round asks usually: a phase that asks fewer closes by the share of these,
        so that a quorum of a quorum is not one. 0 where that is not known.
    counts
        Given the type of a phase's messages and a reply with content, returns whether that has the
        form of an answer; others count towards no quorum.
    """

    def __init__(self, quorum: int | float | None = None, grace: float = GRACE) -> None:
        share = isinstance(quorum, float) and 0.0 < quorum <= 1.0
        count = isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1
        if quorum is not None and not share and not count:
            raise BractError(
                f"quorum: found {quorum!r}; expected a share above 0 and at most 1.0, or a whole "
                "number of clients from 1",
                code="config-value",
            )
        if not (math.isfinite(grace) and grace >= 0.0):
            raise BractError(
                f"grace: found {grace!r}; expected seconds, 0 or more", code="config-value"
            )
        self.quorum = quorum
        self.grace = grace
        self.usual = 0
        self.counts: Callable[[str, Message], bool] = lambda *_: True
        self._server_round = 0
        self._outstanding: dict[str, _Outstanding] = {}
        self._late: list[Late] = []
        self._grid: Grid | None = None
        self._closed: dict[str, str] = {}

    @property
    def server_round(self) -> int:
        """The round that runs, from 1; setting it forgets why messages had no answer before."""
        return self._server_round

    @server_round.setter
    def server_round(self, number: int) -> None:
        self._server_round, self._closed = number, {}

    @property
    def busy(self) -> set[int]:
        """Nodes that still work on a message of a phase that a quorum closed.

        They are asked nothing new until they have answered, for a phase's timeout at the most.
        """
        if self.quorum is None:
            return set()
        now = time.monotonic()
        return {o.node_id for o in self._outstanding.values() if o.until > now}

    def still_busy(self) -> set[int]:
        """Take the late answers that have come; return who is `busy` then."""
        self.look()
        return self.busy

    def needed(self, asked: int) -> int:
        """Return how many answers of ``asked`` clients close a phase; all without a quorum."""
        if self.quorum is None:
            return asked
        return min(asked, answers_needed(self.quorum, max(asked, self.usual)))

    def over(self, grid: Grid) -> Grid:
        """Return a grid whose phases close by this rule."""
        self._grid = grid
        return _ClosingGrid(grid, self)

    def idle(self, grid: Grid) -> Grid:
        """Return a grid that knows none of the nodes that are `busy`."""
        return _IdleGrid(grid, self) if self.busy else grid

    def why(self, message_id: str | None) -> str:
        """Return why a message has no answer."""
        return self._closed.get(message_id or "", "no answer in time")

    def look(self) -> None:
        """Take late answers from the SuperLink, and refuse them."""
        if self._grid is None or not self._outstanding:
            return
        for reply in self._grid.pull_messages(list(self._outstanding)):
            asked = self._outstanding.pop(str(reply.metadata.reply_to_message_id), None)
            if asked is None:
                continue
            reason = f"its {asked.holds} of round {asked.server_round} came after that had closed"
            if reply.has_error():
                words = one_line(reply.error.reason or f"error code {reply.error.code}", 300)
                reason = f"sent no {asked.holds} of round {asked.server_round}: {words}"
            self._late.append(Late(asked.node_id, asked.server_round, reason))

    def take_late(self) -> list[Late]:
        """Return the late answers since the last call."""
        taken, self._late = self._late, []
        return taken

    def phase(
        self, grid: Grid, messages: Sequence[Message], timeout: float | None
    ) -> list[Message]:
        """Send messages and return the answers until the phase closes."""
        kind = messages[0].metadata.message_type if messages else ""
        self.look()
        if self.quorum is None or kind not in _CLOSED_EARLY:
            replies = list(grid.send_and_receive(messages, timeout=timeout))
        else:
            with span("send messages"):
                ids = list(grid.push_messages(messages))
            closed = self._by_quorum(kind, len(messages))
            replies = collect(grid, ids, timeout=timeout, closed=closed)
        self._keep_outstanding(messages, replies, kind, timeout)
        self.look()
        return replies

    def _is_answer(self, kind: str, reply: Message) -> bool:
        return reply.has_content() and self.counts(kind, reply)

    def _by_quorum(self, kind: str, asked: int) -> Callable[[Sequence[Message]], bool]:
        wanted, since, judged = self.needed(asked), list[float](), list[bool]()

        def closed(replies: Sequence[Message]) -> bool:
            judged.extend(self._is_answer(kind, reply) for reply in replies[len(judged) :])
            if sum(judged) < wanted:
                return False
            since.append(time.monotonic())
            return time.monotonic() >= since[0] + self.grace

        return closed

    def _keep_outstanding(
        self, messages: Sequence[Message], replies: Sequence[Message], kind: str, timeout: object
    ) -> None:
        if kind not in _CLOSED_EARLY:
            return
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        missing = [m for m in messages if m.metadata.message_id not in answered]
        until = time.monotonic() + (timeout if isinstance(timeout, int | float) else math.inf)
        reason = "no answer in time"
        came = 0 if self.quorum is None else sum(self._is_answer(kind, r) for r in replies)
        if self.quorum is not None and came >= self.needed(len(messages)):
            reason = (
                f"no answer when the round closed: {came} of {len(messages)} had answered "
                f"(strategy.quorum {self.quorum}, {self.grace:g} s of grace)"
            )
        for message in missing:
            self._closed[message.metadata.message_id] = reason
            self._outstanding[message.metadata.message_id] = _Outstanding(
                message.metadata.dst_node_id, self.server_round, _CLOSED_EARLY[kind], until
            )


class _ClosingGrid(ForwardingGrid):
    def __init__(self, grid: Grid, closing: Closing) -> None:
        super().__init__(grid)
        self._closing = closing

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._closing.phase(self.grid, list(messages), timeout)


class _IdleGrid(ForwardingGrid):
    def __init__(self, grid: Grid, closing: Closing) -> None:
        super().__init__(grid)
        self._closing = closing

    def get_node_ids(self) -> Iterable[int]:
        busy = self._closing.busy
        return [node for node in self.grid.get_node_ids() if node not in busy]
