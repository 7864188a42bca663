"""The Flower records that server and client exchange: their names, and how to write and read them.

A train message carries ``arrays`` (parameters and buffers of the global model) and ``config``. A
reply carries ``update`` (see `bract.update`), ``buffers`` where the model has any, ``metrics`` and
``declared``: the client's name, its version of bract, and what the protocol declares. Where updates
are encrypted (see `bract.ciphertexts`), ``ciphertexts`` replaces ``update`` and ``buffers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from bract.errors import BractError
from bract.update import Tensors, difference

ARRAYS = "arrays"
CONFIG = "config"
UPDATE = "update"
BUFFERS = "buffers"
CIPHERTEXTS = "ciphertexts"
METRICS = "metrics"
DECLARED = "declared"
DEFENSES = "bract.defenses"

ROUND_KEY = "server-round"
VERSION_KEY = "bract-version"
NUM_EXAMPLES_KEY = "num-examples"
PROXIMAL_KEY = "proximal-mu"

BUFFER_ENDINGS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Contribution:
    """One client's answer to a train message, as the server reads it.

    Attributes
    ----------
    node_id, client
        Flower's node id, and the name that the client gave itself.
    update, buffers
        The update, and the buffers after local training.
    num_examples
        Examples that the client trained on; weights FedAvg.
    metrics
        What the client measured, by name.
    protocol
        What it declares of its computation (keys of `bract.observation.Protocol`).
    ciphertexts
        The encrypted update, ``uint8`` tensors; ``update`` and ``buffers`` are then empty.
    """

    node_id: int
    client: str
    update: Tensors
    num_examples: int
    buffers: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    ciphertexts: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A client that sent an error, or nothing, in place of an update."""

    node_id: int
    client: str
    reason: str


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Write tensors to an array record; order, dtypes and shapes are kept."""
    return ArrayRecord(
        {name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()}
    )


def from_arrays(record: ArrayRecord) -> Tensors:
    """Read an array record to tensors on the CPU."""
    return dict(record.to_torch_state_dict())


def write_reply(
    *,
    client: str,
    version: str,
    update: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    num_examples: int,
    metrics: Mapping[str, float],
    protocol: Mapping[str, Any],
    reply_to: Message,
    ciphertexts: ArrayRecord | None = None,
) -> Message:
    """Build a client's reply to a train message.

    With ``ciphertexts`` neither ``update`` nor ``buffers`` is sent.
    """
    content = RecordDict(
        {
            **({CIPHERTEXTS: ciphertexts} if ciphertexts else {UPDATE: to_arrays(update)}),
            METRICS: MetricRecord({NUM_EXAMPLES_KEY: num_examples, **metrics}),
            DECLARED: ConfigRecord(
                {"client": client, VERSION_KEY: version, "protocol": json.dumps(dict(protocol))}
            ),
        }
    )
    if buffers and not ciphertexts:
        content[BUFFERS] = to_arrays(buffers)
    return Message(content, reply_to=reply_to)


def write_final(
    client: str, metrics: Mapping[str, float], *, num_examples: int, reply_to: Message
) -> Message:
    """Build a client's word on the final model of an encrypted run."""
    content = RecordDict(
        {
            METRICS: MetricRecord({NUM_EXAMPLES_KEY: num_examples, **metrics}),
            DECLARED: ConfigRecord({"client": client}),
        }
    )
    return Message(content, reply_to=reply_to)


def read_final(message: Message) -> tuple[str, dict[str, float]]:
    """Read the client's name and its metrics, ``num-examples`` among them.

    Raises
    ------
    BractError
        If a record is missing.
    """
    try:
        client = str(message.content.config_records[DECLARED]["client"])
        metrics = message.content.metric_records[METRICS]
        return client, {n: float(v) for n, v in metrics.items() if isinstance(v, int | float)}
    except KeyError as error:
        raise BractError(f"sent no word on the final model (no {error})") from error


def is_bract_reply(message: Message) -> bool:
    """Tell a reply written by `write_reply` from a stranger's."""
    if not message.has_content() or DECLARED not in message.content:
        return False
    return UPDATE in message.content or CIPHERTEXTS in message.content


def read_reply(message: Message) -> Contribution:
    """Read a reply written by `write_reply`.

    Raises
    ------
    BractError
        If a record is missing; the message names the node.
    """
    node_id = message.metadata.src_node_id
    try:
        content = message.content
        encrypted = CIPHERTEXTS in content
        declared = content.config_records[DECLARED]
        metrics: dict[str, Any] = dict(content.metric_records[METRICS])
        num_examples = int(metrics.pop(NUM_EXAMPLES_KEY))
        if num_examples < 1:
            raise ValueError(f"a positive {NUM_EXAMPLES_KEY} (found {num_examples})")
        return Contribution(
            node_id=node_id,
            client=str(declared["client"]),
            update={} if encrypted else from_arrays(content.array_records[UPDATE]),
            buffers=from_arrays(content.array_records[BUFFERS]) if BUFFERS in content else {},
            ciphertexts=from_arrays(content.array_records[CIPHERTEXTS]) if encrypted else {},
            num_examples=num_examples,
            metrics={name: float(value) for name, value in metrics.items()},
            protocol=json.loads(str(declared["protocol"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BractError(
            f"node {node_id} sent a reply that lacks {error}; is its client bract's own?"
        ) from error


def read_weights(message: Message, sent: Mapping[str, Tensor]) -> Contribution:
    """Read what a ClientApp usually replies to a train message: its local weights.

    The reply holds one array record with the names and shapes of ``sent``, and the metric
    ``num-examples``. The update is ``sent - returned``; the client is called ``node-<id>``.

    Parameters
    ----------
    sent
        Parameters and buffers that the train message carried.

    Raises
    ------
    BractError
        If the arrays are not those that were sent, or ``num-examples`` is missing.
    """
    node_id = message.metadata.src_node_id
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise BractError(f"node {node_id} replied with {len(records)} array records, expected one")
    returned = from_arrays(records[0])
    wrong = sorted(set(sent) ^ set(returned)) or [
        name for name, value in sent.items() if value.shape != returned[name].shape
    ]
    if wrong:
        raise BractError(
            f"node {node_id} replied with other arrays than it was sent: {', '.join(wrong[:5])}"
        )
    metrics = {
        name: float(value)
        for record in message.content.metric_records.values()
        for name, value in record.items()
        if isinstance(value, int | float)
    }
    if not metrics.get(NUM_EXAMPLES_KEY, 0.0) > 0.0:
        raise BractError(
            f"node {node_id} replied with metric {NUM_EXAMPLES_KEY!r} = "
            f"{metrics.get(NUM_EXAMPLES_KEY)}, expected the number of examples it trained on"
        )
    parameters, _ = split_state(sent)
    return Contribution(
        node_id=node_id,
        client=f"node-{node_id}",
        update=difference(parameters, returned),
        buffers={name: value for name, value in returned.items() if name not in parameters},
        num_examples=int(metrics.pop(NUM_EXAMPLES_KEY)),
        metrics=metrics,
    )


def split_state(arrays: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Split a state dict into parameters and buffers, by dtype and PyTorch's buffer names."""
    buffers = {
        name: value
        for name, value in arrays.items()
        if not value.is_floating_point() or name.endswith(BUFFER_ENDINGS)
    }
    return {n: v for n, v in arrays.items() if n not in buffers}, buffers
