"""Partial decryptions on their way through a server that must not read them.

A client encrypts its partial decryptions once, under a key of this one answer, and seals that key
for every other client. Who collects enough partial decryptions reads the result; the server
collects boxes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bract.ciphertexts import readable
from bract.errors import BractError
from bract.keyexchange import as_list, box_context
from bract.paillier import Identity, PartialDecryption, open_sealed, seal

PARTIALS = "partials"
PARTIAL_KEYS = "partial-keys"


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
            headers = zip(as_list(keys["names"]), as_list(keys["headers"]), strict=True)
            boxes = zip(map(int, as_list(keys["nodes"])), as_list(keys["boxes"]), strict=True)
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
            node: seal(key, public, box_context(session, sender, node, f"partial decryption {tag}"))
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
        senders, boxes = as_list(keys["senders"]), as_list(keys["boxes"])
        found: dict[str, list[PartialDecryption]] = {}
        for number, (sender, box) in enumerate(zip(senders, boxes, strict=True)):
            context = box_context(session, int(sender), recipient, f"partial decryption {tag}")
            with readable():
                cipher = ChaCha20Poly1305(open_sealed(box, identity, context))
            payload = content.array_records[f"{PARTIALS}-{tag}-{number}"]
            headers = json.loads(as_list(keys["headers"])[number])
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


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")  # the key serves one message, and numbers do not repeat
