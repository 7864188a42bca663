"""Flower's older API: fit instructions and results, as the train messages that they stand for.

A strategy of ``flwr.server.strategy`` sees no message. Its parameters are lists of serialised
arrays without names, so their names are their numbers, in the order of the model's ``state_dict``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)

from bract.errors import one_line
from bract.protocol.records import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES_KEY, ROUND_KEY

_PHASES = (
    "initialize_parameters",
    "configure_fit",
    "aggregate_fit",
    "configure_evaluate",
    "aggregate_evaluate",
    "evaluate",
)
"""Methods that Flower's server calls of a strategy."""


def is_older(strategy: object) -> bool:
    """Return whether a strategy is one of Flower's older API, or has its methods."""
    return all(callable(getattr(strategy, name, None)) for name in _PHASES)


def run_of(instructions: Sequence[tuple[Any, Any]]) -> int | None:
    """Return the run that clients belong to; None where they are connected without a SuperLink."""
    for client, _ in instructions:
        run = getattr(client, "run_id", None)
        if isinstance(run, int):
            return run
    return None


def requests_of(server_round: int, instructions: Iterable[tuple[Any, Any]]) -> list[Message]:
    """Return pairs of client and fit instructions as train messages, which read alike."""
    return [
        _message(
            client,
            server_round,
            {
                ARRAYS: _arrays(ins.parameters),
                CONFIG: ConfigRecord({**_allowed(ins.config), ROUND_KEY: server_round}),
            },
        )
        for client, ins in instructions
    ]


def replies_of(server_round: int, results: Iterable[tuple[Any, Any]]) -> list[Message]:
    """Return pairs of client and fit result as the replies to `requests_of`."""
    return [_reply(client, server_round, res) for client, res in results]


def evaluations_of(server_round: int, results: Iterable[tuple[Any, Any]]) -> list[Message]:
    """Return pairs of client and evaluate result as replies to evaluate messages."""
    return [
        _message(
            client,
            server_round,
            _measured(res, {"loss": float(res.loss)}),
            kind=MessageType.EVALUATE,
        )
        for client, res in results
    ]


def holds_sums(results: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether several clients' results are one: SecAgg+ puts the sum in place of each."""
    first = results[0][1].parameters if results else None
    return len(results) > 1 and all(res.parameters is first for _, res in results)


def reason_of(failures: Sequence[Any]) -> str:
    """Return the first failure of a round, in one line; empty where there is none."""
    for failure in failures:
        if isinstance(failure, BaseException):
            return one_line(failure, 500) or type(failure).__name__
        return one_line(failure[1].status.message, 500) or "a result that is no success"
    return ""


def _message(
    client: Any,
    server_round: int,
    content: Mapping[str, Any],
    *,
    kind: str = MessageType.TRAIN,
) -> Message:
    """Return what a recorder reads of a message; outside a run Flower creates none."""
    node = _node(client)
    identity = f"{server_round}-{client.cid}"
    if kind != MessageType.TRAIN:
        identity += f"-{kind}"
    metadata = SimpleNamespace(
        message_id=identity,
        message_type=kind,
        dst_node_id=node,
        src_node_id=node,
        reply_to_message_id=identity,
        group_id=str(server_round),
        run_id=getattr(client, "run_id", 0),
    )
    return cast(
        Message,
        SimpleNamespace(
            metadata=metadata, content=RecordDict(dict(content)), has_content=lambda: True
        ),
    )


def _reply(client: Any, server_round: int, res: Any) -> Message:
    content = {ARRAYS: _arrays(res.parameters), **_measured(res, {})}
    return _message(client, server_round, content)


def _measured(res: Any, more: Mapping[str, float]) -> dict[str, Any]:
    """Return the records of a result's measurements and of its other values."""
    numbers = {
        name: value
        for name, value in (res.metrics or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    others = {name: value for name, value in (res.metrics or {}).items() if name not in numbers}
    content: dict[str, Any] = {
        METRICS: MetricRecord({**more, **numbers, NUM_EXAMPLES_KEY: int(res.num_examples)}),
    }
    if others := _allowed(others):
        content[CONFIG] = ConfigRecord(others)
    return content


def _arrays(parameters: Any) -> ArrayRecord:
    kind = parameters.tensor_type
    return ArrayRecord(
        {
            str(number): Array(dtype="", shape=(), stype=kind, data=data)
            for number, data in enumerate(parameters.tensors)
        }
    )


def _allowed(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a record of Flower's can hold; ``proximal_mu`` by the name that it has now."""
    return {
        name.replace("proximal_mu", "proximal-mu"): value
        for name, value in (config or {}).items()
        if isinstance(name, str) and isinstance(value, bool | int | float | str | bytes)
    }


def _node(client: Any) -> int:
    """Return the number of a client's node, or one of its own for a client without a node."""
    node = getattr(client, "node_id", None)
    if isinstance(node, int):
        return node
    if client.cid.isdecimal():
        return int(client.cid)
    return int.from_bytes(hashlib.sha256(client.cid.encode()).digest()[:7], "big")
