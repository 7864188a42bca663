"""The messages of encrypted aggregation beside training: who is there, and the keys.

Everything here passes through the server, which can read it: public keys, sealed boxes, and partial
decryptions that are encrypted under a key of their own, boxed for each client.

=====================  =====================================================================
message type           asks a client
=====================  =====================================================================
``query.hello``        who it is, which key it holds, and which round's model it keeps
``query.deal``         to generate the key (or take its own) and box it for the named clients
``query.partial``      for partial decryptions of aggregates, boxed for the named clients
``evaluate.final``     to apply the last aggregate, judge the final model and keep it
=====================  =====================================================================

A client that cannot do what it was asked, because it lacks the key or an aggregate, answers with a
`Hello` of its present state, and is sent what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

import bract
from bract.ciphertexts import readable
from bract.errors import BractError
from bract.paillier import (
    Context,
    Identity,
    open_sealed,
    seal,
)

HELLO_TYPE = "query.hello"
DEAL_TYPE = "query.deal"
PARTIAL_TYPE = "query.partial"
FINAL_TYPE = "evaluate.final"

HELLO = "hello"
KEY_BOX = "key-box"
RECIPIENTS = "recipients"
DEALT = "dealt"
TAG_KEY = "tag"
COUNT_KEY = "vectors"
SESSION_KEY = "bract-session"
"""Names one run, which a resumed run keeps: keys and models of another one are not its own."""

_KEY_PURPOSE = "private key"


@dataclass(frozen=True)
class Hello:
    """What a client says of itself.

    Attributes
    ----------
    node_id, client, partition
        Flower's node id, the client's name, and its part of the data, from 0.
    key
        Text of the public key whose private key or share it holds; empty where it holds none.
    identity
        Its X25519 public key for this run, 32 bytes.
    model_round
        The round after which it holds the global model; 0 the initial one, -1 none.
    """

    node_id: int
    client: str
    partition: int
    key: bytes
    identity: bytes
    model_round: int

    def to_content(self) -> RecordDict:
        """Write to the content of a reply."""
        fields = ConfigRecord(
            {
                "client": self.client,
                "bract-version": bract.__version__,
                "partition": self.partition,
                "key": self.key,
                "identity": self.identity,
                "model-round": self.model_round,
            }
        )
        return RecordDict({HELLO: fields})

    @classmethod
    def read(cls, message: Message, node_id: int) -> Hello:
        """Read a reply.

        Raises
        ------
        BractError
            If the reply holds no such record.
        """
        try:
            fields = message.content.config_records[HELLO]
            return cls(
                node_id=node_id,
                client=str(fields["client"]),
                partition=int(str(fields["partition"])),
                key=as_bytes(fields["key"]),
                identity=as_bytes(fields["identity"]),
                model_round=int(str(fields["model-round"])),
            )
        except (KeyError, ValueError) as error:
            raise BractError(
                f"node {node_id} did not say which key it holds ({error}); encrypted runs need "
                "bract's own ClientApp of the server's version"
            ) from error


def is_hello(message: Message) -> bool:
    """Tell a client's word that it lacks something from an answer."""
    return message.has_content() and HELLO in message.content


def write_recipients(identities: Mapping[int, bytes]) -> ConfigRecord:
    """Name who is to open the boxes: node ids and their X25519 public keys."""
    return ConfigRecord(
        {"nodes": [str(n) for n in identities], "identities": list(identities.values())}
    )


def read_recipients(content: RecordDict) -> dict[int, bytes]:
    """Read what `write_recipients` wrote."""
    fields = content.config_records[RECIPIENTS]
    return dict(zip(map(int, as_list(fields["nodes"])), as_list(fields["identities"]), strict=True))


def box_keys(
    keys: Mapping[int, bytes], identities: Mapping[int, bytes], *, session: str, sender: int
) -> dict[int, bytes]:
    """Seal a private key or share for each recipient, by node id."""
    with readable():
        return {
            node: seal(
                keys[node], identities[node], box_context(session, sender, node, _KEY_PURPOSE)
            )
            for node in keys
        }


def open_key_box(content: RecordDict, identity: Identity, *, session: str, recipient: int) -> bytes:
    """Open the box that a train message carries.

    Raises
    ------
    BractError
        If it is not for this client and run, or was altered.
    """
    fields = content.config_records[KEY_BOX]
    context = box_context(session, int(str(fields["sender"])), recipient, _KEY_PURPOSE)
    with readable():
        return open_sealed(as_bytes(fields["box"]), identity, context)


def write_key_box(sender: int, box: bytes) -> ConfigRecord:
    """Pass a box on to its recipient."""
    return ConfigRecord({"sender": str(sender), "box": box})


def write_dealt(public: bytes, boxes: Mapping[int, bytes]) -> RecordDict:
    """Answer `DEAL_TYPE`: the public key, and one box a recipient."""
    fields = ConfigRecord(
        {"key": public, "nodes": [str(n) for n in boxes], "boxes": list(boxes.values())}
    )
    return RecordDict({DEALT: fields})


def read_dealt(message: Message) -> tuple[bytes, dict[int, bytes]]:
    """Read the public key's text and the boxes by node id.

    Raises
    ------
    BractError
        If the reply holds none.
    """
    try:
        fields = message.content.config_records[DEALT]
        boxes = zip(map(int, as_list(fields["nodes"])), as_list(fields["boxes"]), strict=True)
        return as_bytes(fields["key"]), dict(boxes)
    except (KeyError, ValueError) as error:
        raise BractError(f"sent no key boxes ({error})") from error


def aggregate_name(number: int) -> str:
    """Name of the record with one round's aggregate."""
    return f"aggregate-{number}"


def round_tag(number: int) -> str:
    """What the partial decryptions of one round's aggregate are called."""
    return f"round-{number}"


def fused_tag(number: int) -> str:
    """What the partial decryptions of one round's fused models are called."""
    return f"fused-{number}"


def vector_name(index: int) -> str:
    """Name of the record with one aggregate to decrypt partially."""
    return f"vector-{index}"


def stripped_name(index: int) -> str:
    """Name of the record with what `bract.paillier.strip_messages` made of it."""
    return f"stripped-{index}"


def box_context(session: str, sender: int, recipient: int, purpose: str) -> Context:
    """Return what a box belongs to: run, parties and purpose."""
    return Context(session, str(sender), str(recipient), purpose)


def as_bytes(value: object) -> bytes:
    """Return a config record's value, refusing what is no bytes."""
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, found {type(value).__name__}")
    return value


def as_list(value: object) -> list[Any]:
    """Return a config record's value, refusing what is no list."""
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value
