"""FedAvg over updates (McMahan et al. 2017): w <- w - server_lr * sum_i p_i update_i."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from torch import Tensor

from bract.errors import BractError, RunFailedError, one_line
from bract.process.timeline import span
from bract.protocol.arrays import PACKED, to_packed, view_arrays
from bract.protocol.node_names import ClientNames, node_name
from bract.protocol.records import (
    ARRAYS,
    NUM_EXAMPLES_KEY,
    PACKING_KEY,
    UPDATE,
    Contribution,
    Failure,
    is_absence,
    is_bract_reply,
    read_reply,
    read_weights,
    reply_name,
    tells_examples,
    to_arrays,
    who_failed,
)
from bract.strategies.aggregation import aggregated, check_contribution, fedavg_weights
from bract.strategies.closing import GRACE, Closing, Late
from bract.strategies.polling import nodes_of
from bract.strategies.scores import Boosting
from bract.strategies.waiting import Waiting

_log = logging.getLogger(__name__)

MAX_SHARE = 0.75

_CLAIM = re.compile(r"<class 'bract\.[\w.]+'>:<'(?P<client>[^:]+): (?P<text>.*)'>", re.DOTALL)
"""Flower's form of an error that bract's own client raised: its name, then the text."""


@dataclass(frozen=True)
class RoundOutcome:
    """The result of one round: the answers without tensors, their weights, the failed clients.

    ``boosting`` holds the scores behind the weights where the strategy is FedBoosting. ``late`` are
    the answers to earlier rounds that came since the round before, and were refused.
    """

    server_round: int
    contributions: tuple[Contribution, ...] = ()
    weights: tuple[float, ...] = ()
    failures: tuple[Failure, ...] = ()
    boosting: Boosting | None = None
    late: tuple[Late, ...] = ()


class FedAvg(FlowerFedAvg):
    """Average the clients' updates.

    Node sampling is Flower's. Clients of bract reply with an update rather than with weights,
    because a float32 difference of weights would round away what a defense did to small
    coordinates; the usual reply of other ClientApps, local weights and ``num-examples``, is taken
    too. Who answers with a packed update (`bract.protocol.arrays.to_packed`) is sent packed models
    from then on. An answer that cannot be read, has missing, misshapen or non-finite tensors, or
    comes under another client's name, counts as a failure of its client.

    Parameters
    ----------
    weighting
        ``examples``: p_i by number of examples. ``uniform``: p_i = 1/N. Over the answers.
    server_lr
        The factor eta of w <- w - eta sum_i p_i g_i.
    max_share
        Largest weight of one client where three or more answered and ``weighting`` is
        ``examples``: by default no client weighs more than three times all others together,
        however many examples it claims. 1.0 takes every client at its word.
    fraction
        Share of the connected nodes that trains in a round.
    min_nodes
        Nodes that must be connected before a round starts; where failures are tolerated, before
        the first one. They are waited for as long as for the answers of a phase.
    tolerate_failures
        False: a client that fails ends the run with an error that names it. True: its
        contribution is left out and the weights are renormalised over who answered; who is gone
        is not waited for in later rounds.
    first_round
        Number of the first round, above 1 where an interrupted run is resumed.
    quorum
        Share of the clients asked (a float up to 1.0) or their number (an int) whose answers close
        a round, where failures are tolerated; see `Closing`. A later round begins once as many
        clients are connected and idle. None waits for all, until ``timeout``.
    grace
        Seconds that the others have after a quorum.

    Attributes
    ----------
    update_dtype
        ``float32``, or the 16-bit type in which updates of float32 parameters may come.
    joins
        First round of clients that do not train from round 1 on, by name. They are asked in every
        round, since names are known by answers alone, and answer without an update until then.
    """

    def __init__(
        self,
        *,
        weighting: Literal["examples", "uniform"] = "examples",
        server_lr: float = 1.0,
        max_share: float = MAX_SHARE,
        fraction: float = 1.0,
        min_nodes: int = 2,
        tolerate_failures: bool = False,
        first_round: int = 1,
        quorum: int | float | None = None,
        grace: float = GRACE,
    ) -> None:
        super().__init__(
            fraction_train=fraction,
            fraction_evaluate=0.0,
            min_train_nodes=max(1, int(min_nodes * fraction)),
            min_available_nodes=min_nodes,
            weighted_by_key=NUM_EXAMPLES_KEY,
        )
        self.weighting: str = weighting
        self.server_lr = server_lr
        if not 0.0 < max_share <= 1.0:
            raise BractError(
                f"max_share: found {max_share}; expected a share above 0, at most 1",
                code="config-value",
            )
        self.max_share = max_share
        self.tolerate_failures = tolerate_failures
        self.first_round = first_round
        self.outcome = RoundOutcome(first_round - 1)
        self._sent: Mapping[str, Tensor] = {}
        self._asked: list[Message] = []
        self.reads_packed: set[int] = set()
        self.waiting = Waiting()
        self.closing = Closing(quorum, grace)
        self.update_dtype: str = "float32"
        self.joins: Mapping[str, int] = {}
        self._usual_number = self.min_train_nodes
        self.names = ClientNames()
        self._names = self.names.by_node
        self._connected: Callable[[], Iterable[int]] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        **more: Any,
    ) -> Result:
        """Run the rounds; ``timeout`` also bounds the wait for clients that are not connected.

        ``more`` goes to Flower's strategy as given: Flower 1.43 has ``should_stop``.

        Raises
        ------
        BractError
            If there is a quorum, and failures are not tolerated.
        RunFailedError
            If too few clients connect in time.
        """
        if self.closing.quorum is not None and not self.tolerate_failures:
            raise BractError(
                f"quorum is {self.closing.quorum}: rounds close without late clients, and "
                "tolerate_failures is False; set it to True, or remove the quorum",
                code="config-conflict",
            )
        self.closing.usual, self.closing.counts = self._usual_number, self.counts
        self.waiting.timeout = timeout
        self.begin(initial_arrays)
        config = ConfigRecord() if train_config is None else train_config
        if self.tolerate_failures:
            grid = self.closing.over(grid)
        result = super().start(
            grid, initial_arrays, num_rounds, timeout, config, evaluate_config, evaluate_fn, **more
        )
        self.deliver(grid, config)
        return result

    def begin(self, initial: ArrayRecord) -> None:
        """Prepare for the first round: a strategy over ciphertexts keeps the initial model."""

    def deliver(self, grid: Grid, config: ConfigRecord) -> None:
        """Send what clients lack after the last round: an encrypted run's last aggregate."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a sample of the nodes to train on ``arrays``."""
        self._sent = view_arrays(arrays)
        self._connected = grid.get_node_ids
        number = server_round + self.first_round - 1
        self.closing.server_round = number
        if self.tolerate_failures and server_round > 1:
            usual = 1 if self.closing.quorum is None else self._usual_number
            self.min_train_nodes = self.min_available_nodes = self.closing.needed(usual)
        self.waiting.until(lambda: self._present(grid), self.min_available_nodes)
        config[PACKING_KEY] = True
        self._asked = list(self._sample(number, arrays, config, self.closing.idle(grid)))
        readers = [m for m in self._asked if m.metadata.dst_node_id in self.reads_packed]
        if readers and self._sent:
            packed = to_packed(self._sent)
            for message in readers:
                message.content = RecordDict({**message.content, ARRAYS: packed})
        return self._asked

    def _sample(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round to the nodes that are drawn."""
        return super().configure_train(number, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no client: with a fraction of 0 Flower 1.21 asks all the same."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Return no measurements, since no client was asked."""
        del server_round, replies

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the updates received.

        Raises
        ------
        RunFailedError
            If every client failed, or one did and failures are not tolerated.
        """
        number = server_round + self.first_round - 1
        replies = list(replies)
        with span("read and check answers"):
            contributions, failures = self._read(replies)
        for failure in failures:
            _log.error("round %d: %s failed: %s", number, failure.client, failure.reason)
        late = tuple(self.closing.take_late())
        for answer in late:
            client = self.names.of(answer.node_id)
            _log.warning("round %d: %s: %s; refused", number, client, answer.reason)
        self.outcome = RoundOutcome(number, failures=failures, late=late)
        if failures and (not self.tolerate_failures or not contributions):
            who = who_failed(failures)
            raise RunFailedError(f"round {number}: {who}")
        if not contributions:
            raise RunFailedError(
                f"round {number}: no client answered in time; "
                "see the clients' logs, or raise strategy.timeout",
                code="clients-missing",
            )
        weights = self.weigh(contributions)
        with span("sum updates"):
            arrays = self.combine(contributions, weights)
        self._asked, self._sent = [], {}  # the model of this round is in memory no longer
        for message in replies:
            _forget_arrays(message)
        contributions = tuple(contribution.without_tensors() for contribution in contributions)
        self.outcome = RoundOutcome(number, contributions, tuple(weights), failures, late=late)
        return arrays, self._mean_metrics(contributions, weights)

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the public weights p_i of the answers; they sum to 1."""
        return fedavg_weights(contributions, self.weighting, self.max_share)

    def combine(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> ArrayRecord:
        """Return the model ``w - server_lr * sum_i weights[i] update_i`` as it goes to clients.

        The only place where updates are touched: a strategy over ciphertexts overrides it.
        """
        return to_arrays(aggregated(self._sent, contributions, weights, self.server_lr))

    def counts(self, kind: str, message: Message) -> bool:
        """Return whether a reply to a ``kind`` of message has the form of an answer.

        Others count towards no quorum. What the answer holds is checked after the phase.
        """
        return kind != MessageType.TRAIN or self.is_update(message)

    def is_update(self, message: Message) -> bool:
        """Return whether a reply has the form of an update, or of local weights."""
        records = list(message.content.array_records.values())
        if is_bract_reply(message):
            found = message.content.array_records.get(UPDATE)
            records = [] if found is None else [found]
        return len(records) == 1 and len(records[0]) > 0 and tells_examples(message)

    def read(self, message: Message) -> Contribution:
        """Read one client's answer."""
        if is_bract_reply(message):
            if PACKED in message.content.array_records.get(UPDATE, {}):
                self.reads_packed.add(message.metadata.src_node_id)
            return read_reply(message)
        return read_weights(message, self._sent)

    def check(self, contribution: Contribution) -> None:
        """Refuse an answer that would spoil the sum."""
        check_contribution(self._sent, contribution, self.server_lr, self.update_dtype)

    def pair(
        self, asked: Iterable[Message], replies: Iterable[Message]
    ) -> tuple[list[tuple[int, Message]], list[Failure]]:
        """Match replies to the nodes that were asked: answers with content, and failures."""
        # An error that the SuperLink itself reports carries the SuperLink's node id, so who was
        # asked is looked up by the message that the reply answers.
        waiting = {m.metadata.message_id: m.metadata.dst_node_id for m in asked}
        answers, errors = [], []
        for message in replies:
            node_id = waiting.pop(message.metadata.reply_to_message_id, None)
            if node_id is None:
                sender = message.metadata.src_node_id
                _log.warning("%s sent a second or unasked answer; left out", self.names.of(sender))
            elif message.has_error():
                reason = message.error.reason or f"error code {message.error.code}"
                errors.append((node_id, reason))
            else:
                answers.append((node_id, message))
        # Replies arrive in any order; of two that claim one name the same one gets it every time,
        # and an answer gets it before any error does.
        answers.sort(key=lambda answer: answer[0])
        failures = []
        for node_id, message in tuple(answers):
            if (name := reply_name(message)) is None:
                continue
            try:
                self.names.claim(node_id, name, self._connected)
            except BractError as error:
                answers.remove((node_id, message))
                failures.append(self.failure(node_id, str(error)))
        failures += [self.failure(node_id, reason) for node_id, reason in errors]
        failures += [
            self.failure(node_id, self.closing.why(message_id))
            for message_id, node_id in waiting.items()
        ]
        return answers, failures

    def failure(self, node_id: int, reason: str) -> Failure:
        """Name a node's failure by the client's own name, else the one it is registered under.

        For a node without either, the reason names the clients that have answered.
        """
        name = self.names.by_node.get(node_id, "")
        # Whom an error names is the client's word: it may name itself, not another.
        if (claim := _CLAIM.fullmatch(reason)) and self.names.claimed(node_id, claim["client"]):
            name, reason = claim["client"], claim["text"]
        elif not name and not (name := self.names.registered.get(node_id, "")):
            name = node_name(node_id)
            if answered := ", ".join(sorted(self.names.by_node.values())):
                reason = f"{reason}; it never answered in this run, as {answered} did"
        return Failure(node_id, name, one_line(reason, 1000))

    def _read(
        self, replies: Iterable[Message]
    ) -> tuple[tuple[Contribution, ...], tuple[Failure, ...]]:
        answers, failures = self.pair(self._asked, replies)
        contributions = []
        for node_id, message in answers:
            if is_absence(message) and self._joins_later(self.names.of(node_id)):
                continue
            try:
                contribution = replace(
                    self.read(message), node_id=node_id, client=self.names.of(node_id)
                )
                self.check(contribution)
            except BractError as error:
                failures.append(self.failure(node_id, str(error)))
                continue
            contributions.append(contribution)
        # Replies arrive in any order; a fixed one keeps the floating point sum reproducible.
        return (
            tuple(sorted(contributions, key=lambda c: (c.client, c.node_id))),
            tuple(sorted(failures, key=lambda f: (f.client, f.node_id))),
        )

    def _joins_later(self, client: str) -> bool:
        return self.joins.get(client, 1) > self.closing.server_round

    def _present(self, grid: Grid) -> list[str]:
        """Return the connected nodes: a client's own name, else the one it is registered under."""
        self.closing.look()
        by_node, busy = self.names.by_node, self.closing.busy
        nodes = list(nodes_of(grid))
        self.names.registered |= {
            node.node_id: one_line(node.name, 80) for node in nodes if node.name
        }
        return [
            by_node.get(node.node_id)
            or self.names.registered.get(node.node_id)
            or self.names.of(node.node_id)
            for node in nodes
            if node.node_id not in busy
        ]

    @staticmethod
    def _mean_metrics(
        contributions: tuple[Contribution, ...], weights: list[float]
    ) -> MetricRecord:
        shared = set.intersection(*(set(c.metrics) for c in contributions))
        return MetricRecord(
            {
                name: sum(w * c.metrics[name] for c, w in zip(contributions, weights, strict=True))
                for name in sorted(shared)
            }
        )


def _forget_arrays(message: Message) -> None:
    """Let go of an answer's arrays: Flower's loop refers to it until the next answers are there."""
    if message.has_content():
        arrays = message.content.array_records
        kept = {name: record for name, record in message.content.items() if name not in arrays}
        message.content = RecordDict(kept)
