"""The messages of encrypted aggregation besides training: announcement of clients, and keys.

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

A client that cannot do what it was asked, because it lacks the key or an aggregate, or was sent
partial decryptions that are not proven, answers with a `Hello` of its present state, and is sent
what it lacks.

Input of every reader here is untrusted: any fault in it raises `BractError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

import bract
from bract.config.client_names import check_name
from bract.errors import BractError, one_line
from bract.paillier.exchange import (
    SEALED_BYTES,
    Context,
    Identity,
    is_proven,
    open_sealed,
    prove,
    require_usable,
    seal,
)
from bract.paillier.keyfile import MOST_BYTES, load_public
from bract.protocol.ciphertexts import readable
from bract.protocol.records import instructions_of

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

CONTINUES_KEY = "bract-continues"
"""Flower's ids of the runs that a resumed run continues, as text: clients go on with their state of
the last of them, where the configuration allows it."""

CHALLENGE_KEY = "bract-challenge"
"""A fresh X25519 public key of the server, in hexadecimal digits: with it a client proves that it
holds the private halves of the keys that it announces."""

_KEY_PURPOSE = "private key"
_MOST_KEY = 16_384
_MOST_BOX = MOST_BYTES + SEALED_BYTES


@dataclass(frozen=True)
class Hello:
    """A client's announcement of itself.

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
    refused
        Node ids whose partial decryptions it was sent and refused.
    unconfirmed
        Whether it generated that key itself and the run has not used it yet: its answer with the
        key may have been lost, and it takes another one in its place.
    proof
        Proof that it holds the private half of ``identity``; empty where the message that it
        answers brought no challenge.
    """

    node_id: int
    client: str
    partition: int
    key: bytes
    identity: bytes
    model_round: int
    refused: tuple[int, ...] = ()
    unconfirmed: bool = False
    proof: bytes = b""

    @property
    def key_id(self) -> str:
        """Identity of the key that it claims to hold; empty if it holds none."""
        with readable():
            return load_public(self.key).key_id if self.key else ""

    def proven(self, identity: Identity, challenge: bytes | None, session: str) -> Hello:
        """Return it with the proof for a challenge, where there is one.

        Parameters
        ----------
        identity
            Key pair of ``identity``.
        session
            The run's, as the server drew it.
        """
        if challenge is None:
            return self
        return replace(self, proof=prove([identity], challenge, self._context(session)))

    def check_proof(self, challenge: Identity, session: str) -> None:
        """Refuse an identity of which this client does not prove that it is its own.

        Parameters
        ----------
        challenge
            Key pair whose public half was sent.
        session
            The run's.
        """
        if not is_proven(self.proof, [self.identity], challenge, self._context(session)):
            raise BractError(unproven(self.identity), code="identity-refused")

    def _context(self, session: str) -> Context:
        purpose = f"hello with key {sha256(self.key).hexdigest()}"
        return Context(session, str(self.node_id), "server", purpose)

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
                "refused": [str(node_id) for node_id in self.refused],
                "unconfirmed": self.unconfirmed,
                "proof": self.proof,
            }
        )
        return RecordDict({HELLO: fields})

    @classmethod
    def read(cls, message: Message, node_id: int) -> Hello:
        """Read a reply.

        Raises
        ------
        BractError
            If the reply holds no such record, or one that no client of bract writes: an X25519 key
            with which nothing can be sealed, text that is no public key, a name with line breaks.
        """
        try:
            fields = message.content.config_records[HELLO]
            hello = cls(
                node_id=node_id,
                client=check_name(fields["client"]),
                partition=as_integer(fields["partition"]),
                key=as_bytes(fields["key"]),
                identity=as_bytes(fields["identity"]),
                model_round=as_integer(fields["model-round"]),
                refused=tuple(map(as_integer, as_list(fields["refused"]))),
                unconfirmed=as_boolean(fields["unconfirmed"]),
                proof=as_bytes(fields["proof"]),
            )
        except (KeyError, ValueError) as error:
            if isinstance(error, BractError):
                raise
            raise BractError(
                f"node {node_id} did not say which key it holds ({one_line(error, 200)}); "
                "encrypted runs need bract's own ClientApp of the server's version",
                code="message-malformed",
            ) from error
        _require_usable(hello.identity)
        if len(hello.key) > _MOST_KEY:
            raise BractError(
                f"sent {len(hello.key)} bytes as its public key", code="message-malformed"
            )
        if hello.model_round < -1:
            raise BractError(
                f"holds the model of round {hello.model_round}, expected -1 or more",
                code="message-malformed",
            )
        assert hello.key_id is not None  # parses the key
        return hello


def unproven(identity: bytes) -> str:
    """Return the fault of a client that announced keys without a valid proof."""
    return (
        f"does not prove that the keys of identity {identity.hex()} are its own: they are another "
        "client's, or its answer was changed on the way; set identity-key in its node config to a "
        "key of its own"
    )


def read_challenge(content: RecordDict) -> bytes | None:
    """Return the server's X25519 public key for a proof; None where a message brings none."""
    found = instructions_of(content).get(CHALLENGE_KEY)
    if found is None:
        return None
    try:
        public = bytes.fromhex(as_text(found))
    except ValueError as error:
        raise BractError(
            f"the message's {CHALLENGE_KEY}: {one_line(error, 200)}", code="message-malformed"
        ) from error
    _require_usable(public)
    return public


def continued_runs(content: RecordDict) -> tuple[str, ...]:
    """Read Flower's ids of the runs that a message's run states to continue; none in a new run."""
    found = instructions_of(content).get(CONTINUES_KEY)
    try:
        return () if found is None else tuple(map(as_text, as_list(found)))
    except ValueError as error:
        raise BractError(
            f"the message's {CONTINUES_KEY}: {error}", code="message-malformed"
        ) from error


def is_hello(message: Message) -> bool:
    """Return whether a reply announces that its client lacks something, rather than an answer."""
    return message.has_content() and HELLO in message.content


def write_recipients(identities: Mapping[int, bytes]) -> ConfigRecord:
    """Name who is to open the boxes: node ids and their X25519 public keys."""
    return ConfigRecord(
        {"nodes": [str(n) for n in identities], "identities": list(identities.values())}
    )


def read_recipients(content: RecordDict) -> dict[int, bytes]:
    """Read what `write_recipients` wrote.

    Raises
    ------
    BractError
        If a client or a key is named twice, so that one client would count as two, or a key is
        unusable.
    """
    try:
        fields = content.config_records[RECIPIENTS]
        nodes, identities = as_list(fields["nodes"]), as_list(fields["identities"])
        pairs = list(zip(map(as_integer, nodes), map(as_bytes, identities), strict=True))
    except (KeyError, ValueError) as error:
        raise BractError(
            f"received no clients to seal for ({one_line(error, 200)})", code="message-malformed"
        ) from error
    holders: dict[bytes, int] = {}
    for node, identity in pairs:
        _require_usable(identity)
        if identity in holders or node in holders.values():
            raise BractError(
                f"was asked to seal twice for one client: nodes {holders.get(identity, node)} and "
                f"{node} with identity {identity.hex()}; one site counts once",
                code="identity-refused",
            )
        holders[identity] = node
    return dict(pairs)


def box_keys(
    keys: Mapping[int, bytes],
    identities: Mapping[int, bytes],
    *,
    session: str,
    sender: int,
    identity: Identity,
) -> dict[int, bytes]:
    """Seal a private key or share for each recipient, by node id.

    Parameters
    ----------
    sender, identity
        Node id and X25519 key pair of the sender.
    """
    with readable():
        return {
            node: seal(
                keys[node],
                identities[node],
                box_context(session, sender, node, _KEY_PURPOSE),
                sender=identity,
            )
            for node in keys
        }


def key_box_sender(content: RecordDict) -> bytes:
    """Return the X25519 public key of the stated sender of the box of a train message."""
    try:
        sender = as_bytes(content.config_records[KEY_BOX]["identity"])
    except (KeyError, ValueError) as error:
        raise BractError(
            f"was sent a key box that does not say whose it is ({error})", code="message-malformed"
        ) from error
    _require_usable(sender)
    return sender


def open_key_box(content: RecordDict, identity: Identity, *, session: str, recipient: int) -> bytes:
    """Open the box that a train message carries."""
    public = key_box_sender(content)
    try:
        fields = content.config_records[KEY_BOX]
        sender, box = as_integer(fields["sender"]), as_bytes(fields["box"], most=_MOST_BOX)
    except (KeyError, ValueError) as error:
        raise BractError(
            f"was sent a damaged key box ({error})", code="message-malformed"
        ) from error
    context = box_context(session, sender, recipient, _KEY_PURPOSE)
    with readable():
        return open_sealed(box, identity, context, sender_public=public)


def write_key_box(sender: int, identity: bytes, box: bytes) -> ConfigRecord:
    """Pass a box on to its recipient, with the node id and X25519 public key of its sender."""
    return ConfigRecord({"sender": str(sender), "identity": identity, "box": box})


def write_dealt(public: bytes, boxes: Mapping[int, bytes]) -> RecordDict:
    """Answer `DEAL_TYPE`: the public key, and one box a recipient."""
    fields = ConfigRecord(
        {"key": public, "nodes": [str(n) for n in boxes], "boxes": list(boxes.values())}
    )
    return RecordDict({DEALT: fields})


def read_dealt(message: Message) -> tuple[bytes, dict[int, bytes]]:
    """Read the public key's text and the boxes by node id."""
    try:
        fields = message.content.config_records[DEALT]
        nodes, boxes = as_list(fields["nodes"]), as_list(fields["boxes"])
        sealed = [as_bytes(box, most=_MOST_BOX) for box in boxes]
        pairs = dict(zip(map(as_integer, nodes), sealed, strict=True))
        return as_bytes(fields["key"], most=_MOST_KEY), pairs
    except (KeyError, ValueError) as error:
        raise BractError(
            f"sent no key boxes ({one_line(error, 200)})", code="message-malformed"
        ) from error


def aggregate_name(number: int) -> str:
    """Name of the record with one round's aggregate."""
    return f"aggregate-{number}"


def round_tag(number: int) -> str:
    """Name of the partial decryptions of one round's aggregate."""
    return f"round-{number}"


def fused_tag(number: int) -> str:
    """Name of the partial decryptions of one round's fused models."""
    return f"fused-{number}"


def vector_name(index: int) -> str:
    """Name of the record with one aggregate to decrypt partially."""
    return f"vector-{index}"


def stripped_name(index: int) -> str:
    """Name of the record with what `bract.paillier.strip_messages` made of it."""
    return f"stripped-{index}"


def box_context(session: str, sender: int, recipient: int, purpose: str) -> Context:
    """Return the context of a box: run, parties and purpose."""
    return Context(session, str(sender), str(recipient), purpose)


def _require_usable(public: bytes) -> None:
    with readable():
        require_usable(public)


def as_integer(value: object) -> int:
    """Return a whole number of a config record, which may be written as text."""
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > 20:
        raise ValueError(f"expected a whole number, found {type(value).__name__}")
    return int(value)


def as_boolean(value: object) -> bool:
    """Return a boolean of a record; ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {type(value).__name__}")
    return value


def as_bytes(value: object, *sizes: int, most: int | None = None) -> bytes:
    """Return a config record's value, refusing what is no bytes, or of another size.

    Parameters
    ----------
    sizes
        How many bytes it may have; without them, any number.
    most
        How many bytes it may have at most.
    """
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, found {type(value).__name__}")
    if sizes and len(value) not in sizes:
        raise ValueError(f"expected {' or '.join(map(str, sizes))} bytes, found {len(value)}")
    if most is not None and len(value) > most:
        raise ValueError(f"expected at most {most} bytes, found {len(value)}")
    return value


def as_text(value: object) -> str:
    """Return a config record's value, refusing what is no text."""
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {type(value).__name__}")
    return value


def as_list(value: object) -> list[Any]:
    """Return a config record's value, refusing what is no list."""
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value
