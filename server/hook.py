"""The capture hook: what an honest-but-curious operator of the server writes down.

Wrap any Flower Message-API strategy::

    strategy = HonestButCurious(FedAvg(...), store="captures")
    strategy.start(grid, initial_arrays, ...)

Nothing that the strategy computes changes: messages and replies pass through untouched, and a
capture that cannot be written is logged, never raised.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from bract.errors import BractError
from bract.observation import Observation, ObservationStore, Protocol
from bract.records import (
    ARRAYS,
    DEFENSES,
    ROUND_KEY,
    from_arrays,
    is_bract_reply,
    read_reply,
    split_state,
)
from bract.server.grid import ForwardingGrid
from bract.update import Tensors, difference

_log = logging.getLogger(__name__)


class HonestButCurious(Strategy):
    """Run ``strategy`` unchanged and store one observation per client and round.

    Parameters
    ----------
    strategy
        Any Message-API strategy, Flower's, bract's or somebody's own.
    store
        Folder for the captures, or an `ObservationStore`.
    protocol
        What the protocol declares (`bract.observation.Protocol`): model, normalisation, learning
        rate, local steps and so on. Clients of bract declare what is theirs; for other clients
        everything that an attack should know is given here.
    rounds
        Rounds to capture; None captures all.
    """

    def __init__(
        self,
        strategy: Strategy,
        store: ObservationStore | Path | str,
        *,
        protocol: Protocol | None = None,
        rounds: Collection[int] | None = None,
    ) -> None:
        self.strategy = strategy
        self.recorder = Recorder(
            store if isinstance(store, ObservationStore) else ObservationStore(store),
            protocol or Protocol(),
            rounds,
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the wrapped strategy's own loop over a grid that is listened to."""
        return self.strategy.start(
            _ListeningGrid(grid, self.recorder),
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn,
        )

    # The phases below serve where another strategy wraps this one and calls them itself.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate, and remember what is sent."""
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.recorder.sent(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store what came back, then delegate."""
        replies = list(replies)
        self.recorder.received(replies)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Delegate."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate."""
        self.strategy.summary()


class Recorder:
    """Pair what was sent with what came back, and store it."""

    def __init__(
        self, store: ObservationStore, protocol: Protocol, rounds: Collection[int] | None
    ) -> None:
        self.store = store
        self.protocol = protocol
        self.rounds = None if rounds is None else frozenset(rounds)
        self._open: list[Message] = []
        self._batches = 0

    def sent(self, messages: Iterable[Message]) -> None:
        """Remember train messages until their replies arrive."""
        train = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
        if train:
            self._open = train
            self._batches += 1

    def received(self, replies: Iterable[Message]) -> None:
        """Store one observation for every reply that carries content."""
        for reply in replies:
            request = self._request_of(reply)
            if request is None or not reply.has_content() or not reply.content.array_records:
                continue
            server_round = _round_of(request, self._batches)
            if self.rounds is not None and server_round not in self.rounds:
                continue
            try:
                self.store.save(self._observe(request, reply, server_round))
            except (BractError, OSError, KeyError, TypeError, ValueError) as error:
                _log.error(
                    "round %d: the reply of node %d was not captured: %s",
                    server_round,
                    reply.metadata.src_node_id,
                    error,
                )

    def _request_of(self, reply: Message) -> Message | None:
        for request in self._open:
            if request.metadata.message_id == reply.metadata.reply_to_message_id:
                return request
        return None

    def _observe(self, request: Message, reply: Message, server_round: int) -> Observation:
        arrays = _all_arrays(request)
        provenance: dict[str, Any] = {
            "run_id": str(reply.metadata.run_id),
            "node_id": str(reply.metadata.src_node_id),
            "received": time.time(),
        }
        if is_bract_reply(reply):
            answer = read_reply(reply)
            if answer.ciphertexts:
                # All the server has sent in plain is the initial model, to who had none yet.
                sent = request.content.array_records.get(ARRAYS)
                parameters, buffers = split_state(from_arrays(sent) if sent else {})
                return Observation(
                    round=server_round,
                    client=answer.client,
                    parameters=parameters,
                    buffers=buffers,
                    update={},
                    ciphertexts=answer.ciphertexts,
                    protocol=self.protocol.updated(answer.protocol),
                    provenance=provenance | {"metrics": answer.metrics},
                )
            return Observation(
                round=server_round,
                client=answer.client,
                parameters={n: v for n, v in arrays.items() if n in answer.update},
                buffers={n: v for n, v in arrays.items() if n not in answer.update},
                update=answer.update,
                returned_buffers=answer.buffers,
                protocol=self.protocol.updated(answer.protocol),
                provenance=provenance | {"metrics": answer.metrics},
            )
        metrics = _all_metrics(reply)
        parameters, buffers = split_state(arrays)
        returned, returned_buffers = split_state(_all_arrays(reply))
        declared: dict[str, Any] = {}
        if self.protocol.num_examples is None and "num-examples" in metrics:
            declared["num_examples"] = int(metrics["num-examples"])
        if DEFENSES in reply.content:
            declared["defenses"] = json.loads(str(reply.content.config_records[DEFENSES]["chain"]))
        return Observation(
            round=server_round,
            client=f"node-{reply.metadata.src_node_id}",
            parameters=parameters,
            buffers=buffers,
            update=difference(parameters, returned),
            returned_buffers=returned_buffers,
            protocol=self.protocol.updated(declared),
            provenance=provenance | {"metrics": metrics},
        )


class _ListeningGrid(ForwardingGrid):
    def __init__(self, grid: Grid, recorder: Recorder) -> None:
        super().__init__(grid)
        self._recorder = recorder

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        self._recorder.sent(messages)
        self._recorder.received(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = self.grid.push_messages(messages)
        self._recorder.sent(messages)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.grid.pull_messages(message_ids))
        self._recorder.received(replies)
        return replies


def _round_of(request: Message, counted: int) -> int:
    for record in request.content.config_records.values():
        value = record.get(ROUND_KEY)
        if isinstance(value, int):
            return value
    return counted


def _all_arrays(message: Message) -> Tensors:
    tensors: Tensors = {}
    for record in message.content.array_records.values():
        tensors |= from_arrays(record)
    return tensors


def _all_metrics(message: Message) -> dict[str, float]:
    return {
        name: float(value)
        for record in message.content.metric_records.values()
        for name, value in record.items()
        if isinstance(value, int | float)
    }
