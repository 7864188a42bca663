"""Partial decryptions on their way through a server that must not read them.

A client encrypts its partial decryptions once, under a key of this one answer, and seals that key
for every other client. Who collects enough partial decryptions reads the result; the server
collects boxes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bract.errors import BractError, one_line
from bract.paillier.exchange import SEALED_BYTES, Identity, open_sealed, seal
from bract.paillier.threshold import PartialDecryption
from bract.parse.strict_json import parse_json
from bract.protocol.arrays import from_arrays
from bract.protocol.ciphertexts import readable
from bract.protocol.keyexchange import as_bytes, as_integer, as_list, as_text, box_context

PARTIALS = "partials"
PARTIAL_KEYS = "partial-keys"

_TAG_BYTES = 16
_KEY_BYTES = 32
_BOX_BYTES = _KEY_BYTES + SEALED_BYTES
_MOST_HEADER = 16_384


@dataclass(frozen=True)
class SealedPartials:
    """One client's partial decryptions, which only the recipients of its boxes can read.

    Attributes
    ----------
    sender, identity
        Node id and X25519 public key.
    payload
        Encrypted partial decryptions by name.
    headers
        Their public fields by name, as JSON.
    boxes
        The key of ``payload``, sealed for each recipient by node id.
    """

    sender: int
    identity: bytes
    payload: dict[str, bytes]
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
        return RecordDict({PARTIALS: _write_payload(self.payload), PARTIAL_KEYS: keys})

    @classmethod
    def read(
        cls,
        message: Message,
        sender: int,
        identity: bytes,
        *,
        sizes: Mapping[str, int],
        recipients: Collection[int],
    ) -> SealedPartials:
        """Read a reply.

        Parameters
        ----------
        sizes
            Bytes of each vector that was to be decrypted, by name.
        recipients
            Node ids for which the key was to be sealed.
        """
        try:
            keys = message.content.config_records[PARTIAL_KEYS]
            names, headers = as_list(keys["names"]), as_list(keys["headers"])
            nodes, boxes = as_list(keys["nodes"]), as_list(keys["boxes"])
            found = dict(zip(map(as_text, names), map(as_text, headers), strict=True))
            sized = [as_bytes(box, _BOX_BYTES) for box in boxes]
            sealed = dict(zip(map(as_integer, nodes), sized, strict=True))
            payload = _read_payload(message.content.array_records[PARTIALS])
        except (KeyError, ValueError) as error:
            raise BractError(
                f"sent no partial decryptions ({one_line(error, 200)})", code="message-malformed"
            ) from error
        if set(found) != set(sizes) or set(payload) != set(sizes):
            raise BractError(
                f"was asked for {', '.join(sizes)} and sent {_some(found)}",
                code="message-malformed",
            )
        wrong = [n for n, size in sizes.items() if len(payload[n]) != size + _TAG_BYTES]
        if wrong or any(len(header) > _MOST_HEADER for header in found.values()):
            raise BractError(
                f"sent partial decryptions of another size: {_some(wrong or found)}",
                code="message-malformed",
            )
        missing = set(recipients) - set(sealed)
        if missing:
            raise BractError(
                f"sealed nothing for {len(missing)} of {len(recipients)} clients",
                code="message-malformed",
            )
        return cls(
            sender,
            identity,
            {name: payload[name] for name in sizes},
            {name: found[name] for name in sizes},
            {node: sealed[node] for node in recipients},
        )


def seal_partials(
    partials: Mapping[str, PartialDecryption],
    identities: Mapping[int, bytes],
    *,
    session: str,
    sender: int,
    identity: Identity,
    tag: str,
) -> SealedPartials:
    """Encrypt partial decryptions once, and box the key for each recipient.

    Parameters
    ----------
    sender, identity
        Node id and X25519 key pair of the sender.
    tag
        What is being decrypted ("round 3"); bound into the boxes.
    """
    key = os.urandom(_KEY_BYTES)
    cipher = ChaCha20Poly1305(key)
    headers = {name: json.dumps(part.header()) for name, part in partials.items()}
    payload = {
        name: cipher.encrypt(_nonce(number), part.data.tobytes(), headers[name].encode())
        for number, (name, part) in enumerate(partials.items())
    }
    with readable():
        boxes = {
            node: seal(
                key,
                public,
                box_context(session, sender, node, f"partial decryption {tag}"),
                sender=identity,
            )
            for node, public in identities.items()
        }
    return SealedPartials(sender, identity.public, payload, headers, boxes)


def write_bundle(tag: str, bundle: Sequence[SealedPartials], recipient: int) -> RecordDict:
    """Return the records that let one client finish a decryption."""
    content = RecordDict()
    for number, sealed in enumerate(bundle):
        content[f"{PARTIALS}-{tag}-{number}"] = _write_payload(sealed.payload)
    content[f"{PARTIAL_KEYS}-{tag}"] = ConfigRecord(
        {
            "senders": [str(sealed.sender) for sealed in bundle],
            "identities": [sealed.identity for sealed in bundle],
            "boxes": [sealed.boxes[recipient] for sealed in bundle],
            "headers": [json.dumps(sealed.headers) for sealed in bundle],
        }
    )
    return content


@dataclass(frozen=True)
class Help:
    """One other client's partial decryptions, opened and not yet verified.

    Attributes
    ----------
    sender, identity
        Node id and X25519 public key of the sender.
    partials
        By name; ``data`` has one dimension.
    """

    sender: int
    identity: bytes
    partials: dict[str, PartialDecryption]


class RefusedHelpError(BractError):
    """Partial decryptions that are damaged or not proven.

    Parameters
    ----------
    reasons
        Their faults, by the node id of the sender.
    """

    code = "decryption-refused"

    def __init__(self, tag: str, reasons: Mapping[int, str]) -> None:
        text = "; ".join(f"node {node}: {reason}" for node, reason in reasons.items())
        super().__init__(f"{tag}: refused partial decryptions of {text}")
        self.nodes = tuple(reasons)


def open_bundle(
    content: RecordDict, tag: str, identity: Identity, *, session: str, recipient: int
) -> list[Help]:
    """Read what `write_bundle` wrote: the partial decryptions of each helper.

    Raises
    ------
    RefusedHelpError
        If a helper's sealed box does not open or is garbage.
    BractError
        If a record is missing.
    """
    try:
        keys = content.config_records[f"{PARTIAL_KEYS}-{tag}"]
        rows = list(
            zip(
                map(as_integer, as_list(keys["senders"])),
                map(as_bytes, as_list(keys["identities"])),
                map(as_bytes, as_list(keys["boxes"])),
                map(as_text, as_list(keys["headers"])),
                strict=True,
            )
        )
        payloads = [content.array_records[f"{PARTIALS}-{tag}-{k}"] for k in range(len(rows))]
    except (KeyError, ValueError) as error:
        raise BractError(
            f"the partial decryptions of {tag} are incomplete: {error}", code="message-malformed"
        ) from error
    found, wrong = [], {}
    for (sender, public, box, headers), payload in zip(rows, payloads, strict=True):
        context = box_context(session, sender, recipient, f"partial decryption {tag}")
        try:
            with readable():
                cipher = ChaCha20Poly1305(open_sealed(box, identity, context, sender_public=public))
                found.append(Help(sender, public, _open_payload(cipher, headers, payload)))
        except InvalidTag:
            wrong[sender] = "altered on its way"
        except (BractError, KeyError, TypeError, AttributeError, ValueError) as error:
            wrong[sender] = one_line(error, 200)
    if wrong:
        raise RefusedHelpError(tag, wrong)
    return found


def _open_payload(
    cipher: ChaCha20Poly1305, headers: str, payload: ArrayRecord
) -> dict[str, PartialDecryption]:
    sealed = _read_payload(payload)
    partials = {}
    for number, (name, header) in enumerate(parse_json(headers, most=1 << 20).items()):
        data = cipher.decrypt(_nonce(number), sealed[name], header.encode())
        fields = parse_json(header, most=_MOST_HEADER)
        values = np.frombuffer(data, dtype=np.uint8)
        partials[name] = PartialDecryption.from_header(fields, values)
    return partials


def _write_payload(payload: Mapping[str, bytes]) -> ArrayRecord:
    return ArrayRecord(
        {name: Array(np.frombuffer(data, dtype=np.uint8)) for name, data in payload.items()}
    )


def _read_payload(record: ArrayRecord) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in from_arrays(record).items()}


def _some(names: Collection[str]) -> str:
    return one_line(", ".join(list(names)[:5]) or "nothing", 200)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")  # the key serves one message, and numbers do not repeat
