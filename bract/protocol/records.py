"""The Flower records that server and client exchange: their names, and how to write and read them.

A train message carries ``arrays`` (parameters and buffers of the global model) and ``config``. A
reply carries ``update`` (see `bract.updates.update`), ``buffers`` where the model has any,
``metrics`` and ``declared``: the client's name, its version of bract, and what the protocol
declares; before the client's first round (``strategy.joins``) ``declared`` alone. Where updates are
encrypted (see `bract.protocol.ciphertexts`), ``ciphertexts`` replaces
``update`` and ``buffers``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from bract.config.client_names import check_name
from bract.config.work import MOST_EXAMPLES
from bract.errors import BractError, one_line, shown
from bract.parse.strict_json import parse_json
from bract.protocol.arrays import from_arrays as from_arrays
from bract.protocol.arrays import to_arrays as to_arrays
from bract.protocol.arrays import to_packed
from bract.updates.update import Tensors, difference

ARRAYS = "arrays"
CONFIG = "config"
UPDATE = "update"
BUFFERS = "buffers"
CIPHERTEXTS = "ciphertexts"
POWERS = "powers"
METRICS = "metrics"
DECLARED = "declared"
DEFENSES = "bract.defenses"

ROUND_KEY = "server-round"
VERSION_KEY = "bract-version"
PACKING_KEY = "bract-packing"
"""Set in a train message whose sender reads packed records (`bract.protocol.arrays.to_packed`)."""
NUM_EXAMPLES_KEY = "num-examples"
OLDER_EXAMPLES_KEY = "num_examples"
EXAMPLES_KEYS = (NUM_EXAMPLES_KEY, OLDER_EXAMPLES_KEY, "num-samples", "num_samples")
"""Names under which apps reply with how many examples they trained on, the usual one first."""
"""The same where a client of Flower's older API answers."""
PROXIMAL_KEY = "proximal-mu"
JOINS_KEY = "joins"
"""Set in a client's reply in place of an update: the first round in which it trains."""

_MOST_METRICS = 256
_MOST_NAME = 100

BUFFER_ENDINGS = ("running_mean", "running_var", "num_batches_tracked")


_ROUND_KEYS = (ROUND_KEY, "server_round", "current_round", "round", "rnd")
"""Keys by which strategies name the round in the config of fit instructions."""

_MOST_GROUP = 7
"""Digits of a message's group up to which it is a round."""


def stated_round(message: Message) -> int | None:
    """Return the round that a message names: in its config, or as its group.

    Flower's older API and many a loop of an app's own number the group by the round.
    """
    for record in message.content.config_records.values():
        value = record.get(ROUND_KEY)
        if type(value) is int:
            return value
    group = str(getattr(message.metadata, "group_id", ""))
    return int(group) if group.isdecimal() and len(group) <= _MOST_GROUP else None


def configured_round(config: Mapping[str, Any]) -> int | None:
    """Return the round in the config that Flower's older API hands to ``fit``."""
    found = (config.get(key) for key in _ROUND_KEYS)
    return next((value for value in found if type(value) is int), None)


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
        The client's measurements, by name.
    protocol
        Its declaration of its computation (keys of
        `bract.captures.observation.ClientDeclaration`).
    ciphertexts
        The encrypted update, ``uint8`` tensors; ``update`` and ``buffers`` are then empty.
    powers
        The ``n``-th powers of the ciphertexts, where the client sent them.
    """

    node_id: int
    client: str
    update: Tensors
    num_examples: int
    buffers: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    declaration: dict[str, Any] = field(default_factory=dict)
    ciphertexts: Tensors = field(default_factory=dict)
    powers: Tensors = field(default_factory=dict)

    def without_tensors(self) -> Contribution:
        """Return what is known of the answer once it is in the sum."""
        return replace(self, update={}, buffers={}, ciphertexts={}, powers={})


@dataclass(frozen=True)
class Failure:
    """A client that sent an error, or nothing, in place of an update."""

    node_id: int
    client: str
    reason: str


def who_failed(failures: Iterable[Failure]) -> str:
    """Return who failed and why, in one line."""
    return "; ".join(f"{f.client}: {f.reason}" for f in failures)


def write_reply(
    *,
    client: str,
    version: str,
    update: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    num_examples: int,
    metrics: Mapping[str, float],
    declaration: Mapping[str, Any],
    reply_to: Message,
    ciphertexts: ArrayRecord | None = None,
    powers: ArrayRecord | None = None,
    packed: bool = False,
) -> Message:
    """Build a client's reply to a train message.

    With ``ciphertexts`` neither ``update`` nor ``buffers`` is sent. ``packed`` where the sender of
    ``reply_to`` declared that it reads packed records.
    """
    write = to_packed if packed else to_arrays
    content = RecordDict(
        {
            **({CIPHERTEXTS: ciphertexts} if ciphertexts else {UPDATE: write(update)}),
            METRICS: MetricRecord({NUM_EXAMPLES_KEY: num_examples, **metrics}),
            DECLARED: ConfigRecord(
                {
                    "client": client,
                    VERSION_KEY: version,
                    "declaration": json.dumps(dict(declaration)),
                }
            ),
        }
    )
    if buffers and not ciphertexts:
        content[BUFFERS] = write(buffers)
    if powers and ciphertexts:
        content[POWERS] = powers
    return Message(content, reply_to=reply_to)


def write_absence(client: str, first_round: int) -> RecordDict:
    """Build a client's reply to a train message of a round before its first one."""
    return RecordDict({DECLARED: ConfigRecord({"client": client, JOINS_KEY: first_round})})


def is_absence(message: Message) -> bool:
    """Return whether `write_absence` built a reply."""
    if not message.has_content() or message.content.array_records:
        return False
    return JOINS_KEY in message.content.config_records.get(DECLARED, {})


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
    """Read the client's name and its metrics, ``num-examples`` among them."""
    client = reply_name(message)
    if client is None or METRICS not in message.content.metric_records:
        raise BractError("sent no word on the final model", code="message-malformed")
    return check_name(client), read_metrics(message.content.metric_records[METRICS])


def is_bract_reply(message: Message) -> bool:
    """Return whether `write_reply` wrote a reply, rather than a third-party app."""
    if not message.has_content() or DECLARED not in message.content:
        return False
    return UPDATE in message.content or CIPHERTEXTS in message.content


def reply_name(message: Message) -> object:
    """Return a client of bract's name for itself, unchecked; None if it gives none."""
    if not message.has_content():
        return None
    declared = message.content.config_records.get(DECLARED)
    return None if declared is None else declared.get("client")


def is_encrypted_reply(message: Message) -> bool:
    """Return whether a reply has the form of a ciphertexts' or a masked update's."""
    held = message.content.array_records.get(CIPHERTEXTS)
    return is_bract_reply(message) and bool(held) and tells_examples(message)


def tells_examples(message: Message) -> bool:
    """Return whether a reply names a number of examples, whatever it is."""
    return any(NUM_EXAMPLES_KEY in record for record in message.content.metric_records.values())


def examples_of(value: object) -> int:
    """Return a client's number of examples, a whole number from 1 to `MOST_EXAMPLES`."""
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not whole or not (1 <= value <= MOST_EXAMPLES) or value != int(value):  # type: ignore[operator, call-overload]
        raise BractError(
            f"sent the metric {NUM_EXAMPLES_KEY!r}: found {one_line(value, 40)}, expected the "
            f"number of examples it trained on, a whole number from 1 to {MOST_EXAMPLES:,}",
            code="message-malformed",
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


def read_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are one number each; NaN stays NaN."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if len(name) > _MOST_NAME or not name.isprintable():
            raise BractError(
                f"sent a metric with the name {one_line(repr(name), 60)}", code="message-malformed"
            )
        if isinstance(value, int | float):
            try:
                found[name] = float(value)
            except OverflowError:
                raise BractError(
                    f"sent the metric {shown(name)} as {shown(value)}", code="message-malformed"
                ) from None
    if len(found) > _MOST_METRICS:
        raise BractError(
            f"sent {len(found)} metrics, expected at most {_MOST_METRICS}", code="message-malformed"
        )
    return found


def instructions_of(content: RecordDict) -> ConfigRecord:
    """Return the server's instructions of a message to a client."""
    found = content.config_records.get(CONFIG)
    if found is None:
        raise BractError(
            f"the message has no {CONFIG} record; is its server bract's own?",
            code="message-malformed",
        )
    return found


def instruction(content: RecordDict, key: str) -> object:
    """Return one value of the server's instructions, refusing a message without it."""
    found = instructions_of(content).get(key)
    if found is None:
        raise BractError(
            f"the message's {CONFIG} lacks {key}; is its server bract's own?",
            code="message-malformed",
        )
    return found


def read_declared(text: object) -> dict[str, Any]:
    """Read a client's statement of its computation; `bract.schema.ClientStatement` has its use."""
    if not isinstance(text, str):
        raise BractError(
            f"declared a {type(text).__name__}, expected text that is JSON",
            code="message-malformed",
        )
    try:
        content = parse_json(text, most=16_384)
    except BractError as error:
        raise BractError(f"declared {error}", code=error.code) from None
    if not isinstance(content, dict):
        raise BractError(
            f"declared a JSON {type(content).__name__}, expected an object",
            code="message-malformed",
        )
    return content


def read_reply(message: Message) -> Contribution:
    """Read a reply written by `write_reply`.

    Notes
    -----
    ``client`` is the client's own word: bind it to the node first
    (`bract.protocol.node_names.ClientNames`).
    """
    content = message.content
    encrypted = CIPHERTEXTS in content
    try:
        declared = content.config_records[DECLARED]
        metrics = dict(content.metric_records[METRICS])
        arrays = content.array_records[CIPHERTEXTS if encrypted else UPDATE]
        statement = declared["declaration"]
        client = declared["client"]
        buffers = None if encrypted else content.array_records.get(BUFFERS)
        powers = content.array_records.get(POWERS) if encrypted else None
    except KeyError as error:
        raise BractError(
            f"sent a reply that lacks {error}; is its client bract's own?", code="message-malformed"
        ) from error
    num_examples = examples_of(metrics.pop(NUM_EXAMPLES_KEY, None))
    try:
        tensors = from_arrays(arrays)
        returned = {} if buffers is None else from_arrays(buffers)
        raised = {} if powers is None else from_arrays(powers)
    except BractError as error:
        raise BractError(f"sent what is no tensor: {error}", code=error.code) from error
    return Contribution(
        node_id=message.metadata.src_node_id,
        client=str(client),
        update={} if encrypted else tensors,
        buffers=returned,
        ciphertexts=tensors if encrypted else {},
        powers=raised,
        num_examples=num_examples,
        metrics=read_metrics(metrics),
        declaration=read_declared(statement),
    )


def read_weights(message: Message, sent: Mapping[str, Tensor]) -> Contribution:
    """Read what a ClientApp usually replies to a train message: its local weights.

    The reply holds one array record with the names and shapes of ``sent``, and the metric
    ``num-examples``. Floating arrays of another width are taken to the dtype that was sent. The
    update is ``sent - returned``; the client is called ``node-<id>``.

    Parameters
    ----------
    sent
        Parameters and buffers that the train message carried.
    """
    node_id = message.metadata.src_node_id
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise BractError(
            f"replied with {len(records)} array records, expected one", code="message-malformed"
        )
    try:
        returned = from_arrays(records[0])
    except BractError as error:
        raise BractError(f"replied with what is no tensor: {error}", code=error.code) from error
    wrong = sorted(set(sent) ^ set(returned)) or [
        name for name, value in sent.items() if value.shape != returned[name].shape
    ]
    if wrong:
        names = one_line(", ".join(wrong[:5]), 200)
        raise BractError(
            f"replied with other arrays than it was sent: {names}", code="update-refused"
        )
    returned = {name: _as_sent(name, returned[name], value) for name, value in sent.items()}
    metrics: dict[str, Any] = {
        name: value
        for record in message.content.metric_records.values()
        for name, value in record.items()
    }
    num_examples = examples_of(metrics.pop(NUM_EXAMPLES_KEY, None))
    parameters, _ = split_state(sent)
    return Contribution(
        node_id=node_id,
        client=f"node-{node_id}",
        update=difference(parameters, returned),
        buffers={name: value for name, value in returned.items() if name not in parameters},
        num_examples=num_examples,
        metrics=read_metrics(metrics),
    )


def _as_sent(name: str, value: Tensor, sent: Tensor) -> Tensor:
    if value.dtype == sent.dtype or (value.is_floating_point() and sent.is_floating_point()):
        return value.to(sent.dtype)
    raise BractError(
        f"replied with {name} as {value.dtype}, it was sent as {sent.dtype}", code="update-refused"
    )


def split_state(arrays: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """Split a state dict into parameters and buffers, by dtype and PyTorch's buffer names."""
    buffers = {
        name: value
        for name, value in arrays.items()
        if not value.is_floating_point() or name.endswith(BUFFER_ENDINGS)
    }
    return {n: v for n, v in arrays.items() if n not in buffers}, buffers
