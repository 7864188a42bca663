"""The messages of encrypted aggregation beside training: who is there, keys, partial decryptions.

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

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import bract
from bract.ciphertexts import readable
from bract.errors import BractError
from bract.paillier import (
    Context,
    Identity,
    PartialDecryption,
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
PARTIALS = "partials"
PARTIAL_KEYS = "partial-keys"
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
                key=_bytes(fields["key"]),
                identity=_bytes(fields["identity"]),
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
    return dict(zip(map(int, _list(fields["nodes"])), _list(fields["identities"]), strict=True))


def box_keys(
    keys: Mapping[int, bytes], identities: Mapping[int, bytes], *, session: str, sender: int
) -> dict[int, bytes]:
    """Seal a private key or share for each recipient, by node id."""
    with readable():
        return {
            node: seal(keys[node], identities[node], _context(session, sender, node, _KEY_PURPOSE))
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
    context = _context(session, int(str(fields["sender"])), recipient, _KEY_PURPOSE)
    with readable():
        return open_sealed(_bytes(fields["box"]), identity, context)


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
        boxes = zip(map(int, _list(fields["nodes"])), _list(fields["boxes"]), strict=True)
        return _bytes(fields["key"]), dict(boxes)
    except (KeyError, ValueError) as error:
        raise BractError(f"sent no key boxes ({error})") from error


@dataclass(frozen=True)
class SealedPartials:
    """One client's partial decryptions, which only the recipients of its boxes can read.

    Attributes
    ----------
    sender
        Node id.
    payload
        Encrypted partial decryptions by name.
    headers
        Their public fields by name, as JSON.
    boxes
        The key of ``payload``, sealed for each recipient by node id.
    """

    sender: int
    payload: ArrayRecord
    headers: dict[str, str]
    boxes: dict[int, bytes]

    def to_content(self) -> RecordDict:
        """Write to the content of a reply to `PARTIAL_TYPE`."""
        keys = ConfigRecord(
            {
                "names": list(self.headers),
                "headers": list(self.headers.values()),
                "nodes": [str(n) for n in self.boxes],
                "boxes": list(self.boxes.values()),
            }
        )
        return RecordDict({PARTIALS: self.payload, PARTIAL_KEYS: keys})

    @classmethod
    def read(cls, message: Message, sender: int) -> SealedPartials:
        """Read a reply.

        Raises
        ------
        BractError
            If a record is missing.
        """
        try:
            keys = message.content.config_records[PARTIAL_KEYS]
            headers = zip(_list(keys["names"]), _list(keys["headers"]), strict=True)
            boxes = zip(map(int, _list(keys["nodes"])), _list(keys["boxes"]), strict=True)
            payload = message.content.array_records[PARTIALS]
            return cls(sender, payload, dict(headers), dict(boxes))
        except (KeyError, ValueError) as error:
            raise BractError(f"sent no partial decryptions ({error})") from error


def seal_partials(
    partials: Mapping[str, PartialDecryption],
    identities: Mapping[int, bytes],
    *,
    session: str,
    sender: int,
    tag: str,
) -> SealedPartials:
    """Encrypt partial decryptions once, and box the key for each recipient.

    Parameters
    ----------
    tag
        What is being decrypted ("round 3"); bound into the boxes.
    """
    key = os.urandom(32)
    cipher = ChaCha20Poly1305(key)
    headers = {name: json.dumps(part.header()) for name, part in partials.items()}
    payload = {}
    for number, (name, part) in enumerate(partials.items()):
        sealed = cipher.encrypt(_nonce(number), part.data.tobytes(), headers[name].encode())
        payload[name] = Array(np.frombuffer(sealed, dtype=np.uint8))
    with readable():
        boxes = {
            node: seal(key, public, _context(session, sender, node, f"partial decryption {tag}"))
            for node, public in identities.items()
        }
    return SealedPartials(sender, ArrayRecord(payload), headers, boxes)


def write_bundle(tag: str, bundle: Sequence[SealedPartials], recipient: int) -> RecordDict:
    """Return the records that let one client finish a decryption."""
    content = RecordDict()
    for number, sealed in enumerate(bundle):
        content[f"{PARTIALS}-{tag}-{number}"] = sealed.payload
    content[f"{PARTIAL_KEYS}-{tag}"] = ConfigRecord(
        {
            "senders": [str(sealed.sender) for sealed in bundle],
            "boxes": [sealed.boxes[recipient] for sealed in bundle],
            "names": list(bundle[0].headers),
            "headers": [json.dumps(sealed.headers) for sealed in bundle],
        }
    )
    return content


def open_bundle(
    content: RecordDict, tag: str, identity: Identity, *, session: str, recipient: int
) -> dict[str, list[PartialDecryption]]:
    """Read what `write_bundle` wrote: the partial decryptions of each vector.

    Raises
    ------
    BractError
        If a record is missing, or a box or payload does not open.
    """
    try:
        keys = content.config_records[f"{PARTIAL_KEYS}-{tag}"]
        senders, boxes = _list(keys["senders"]), _list(keys["boxes"])
        found: dict[str, list[PartialDecryption]] = {}
        for number, (sender, box) in enumerate(zip(senders, boxes, strict=True)):
            context = _context(session, int(sender), recipient, f"partial decryption {tag}")
            with readable():
                cipher = ChaCha20Poly1305(open_sealed(box, identity, context))
            payload = content.array_records[f"{PARTIALS}-{tag}-{number}"]
            headers = json.loads(_list(keys["headers"])[number])
            for position, (name, header) in enumerate(headers.items()):
                sealed = payload[name].numpy().tobytes()
                data = np.frombuffer(
                    cipher.decrypt(_nonce(position), sealed, header.encode()), dtype=np.uint8
                )
                fields = json.loads(header)
                found.setdefault(name, []).append(PartialDecryption(**fields, data=data))
        return found
    except InvalidTag:
        raise BractError(f"a partial decryption of {tag} was altered on its way") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BractError(f"the partial decryptions of {tag} are incomplete: {error}") from error


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


def _context(session: str, sender: int, recipient: int, purpose: str) -> Context:
    return Context(session, str(sender), str(recipient), purpose)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")  # the key serves one message, and numbers do not repeat


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, found {type(value).__name__}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value
