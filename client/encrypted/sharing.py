"""Keys for other clients, and help to decrypt for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, RecordDict

from bract.config import FederationConfig
from bract.errors import BractError
from bract.paillier import combine, deal, generate_keypair, partial_decrypt
from bract.paillier.errors import PartialError
from bract.paillier.sharing import KeyShare
from bract.paillier.threshold import PartialDecryption
from bract.process.logs import log_progress
from bract.protocol.arrays import from_arrays
from bract.protocol.ciphertexts import EncryptedUpdate, readable, shaped
from bract.protocol.keyexchange import COUNT_KEY, as_integer, stripped_name, vector_name
from bract.protocol.keyfiles import Key, dump_key
from bract.protocol.partials import Help, RefusedHelpError
from bract.protocol.records import CONFIG
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)


def deal_keys(
    held: Key | None, recipients: Sequence[int], config: FederationConfig
) -> tuple[Key, dict[int, bytes]]:
    """Return the dealer's own key, generated where none is ``held``, and the others' as text.

    Parameters
    ----------
    recipients
        Node ids of the others.
    """
    section = config.encryption
    with readable():
        if section.threshold is None:
            key = held or generate_keypair(section.key_bits, randomness=section.randomness)
            return key, dict.fromkeys(recipients, dump_key(key))
        if held is not None:
            raise BractError(
                "this client has dealt the key shares already and forgot the whole key, so it "
                "has none for a client that joins or lost its share; give the clients "
                "state-dir, or provision key files",
                code="key-missing",
            )
        own, *others = deal(
            section.threshold,
            config.clients,
            section.key_bits,
            degree=section.degree,
            randomness=section.randomness,
        )
    return own, {n: dump_key(share) for n, share in zip(recipients, others, strict=False)}


def partials_of(share: KeyShare, content: RecordDict) -> dict[str, PartialDecryption]:
    """Return what a share makes of the aggregates of a message, by ``<index>.<part>``."""
    partials = {}
    for index in range(_count(content)):
        update = EncryptedUpdate.from_tensors(from_arrays(_record(content, vector_name(index))))
        stripped = from_arrays(_record(content, stripped_name(index)))
        for part, vector in update.vectors.items():
            if part not in stripped:
                raise BractError(
                    f"was sent no powers of {part} to decrypt", code="message-malformed"
                )
            with readable():
                partials[f"{index}.{part}"] = partial_decrypt(
                    share,
                    vector,
                    stripped[part].numpy(),
                    progress=log_progress(_log, f"helping to decrypt {part}"),
                )
    return partials


def join_partials(
    share: KeyShare, update: EncryptedUpdate, helpers: Sequence[Help], tag: str, index: int
) -> dict[str, Tensors]:
    """Return the weighted mean that ``t`` partial decryptions give.

    Parameters
    ----------
    helpers
        The partial decryptions of each helper, by ``<index>.<part>``.
    tag
        What is decrypted, for the message.

    Raises
    ------
    RefusedHelpError
        If a partial decryption is missing, of another vector or share, or not proven.
    BractError
        If they are too few, or ``update`` is of another key.
    """
    means = {}
    for part, vector in update.vectors.items():
        name = f"{index}.{part}"
        lacking = {h.sender: f"nothing for {part}" for h in helpers if name not in h.partials}
        misshapen = {
            h.sender: f"{h.partials[name].data.size} bytes for {part}"
            for h in helpers
            if name in h.partials and h.partials[name].data.size != vector.data.size
        }
        if lacking or misshapen:
            raise RefusedHelpError(tag, lacking | misshapen)
        found = [
            replace(h.partials[name], data=h.partials[name].data.reshape(vector.data.shape))
            for h in helpers
        ]
        try:
            with readable():
                values = combine(
                    share, vector, found, progress=log_progress(_log, f"decrypting {part}")
                )
        except BractError as error:
            if isinstance(error.__cause__, PartialError):
                wrong = [helpers[position].sender for position in error.__cause__.positions]
                raise RefusedHelpError(tag, dict.fromkeys(wrong, str(error))) from error
            raise
        means[part] = shaped(values, update.shapes[part])
    return means


def _count(content: RecordDict) -> int:
    try:
        return as_integer(content.config_records[CONFIG][COUNT_KEY])
    except (KeyError, ValueError) as error:
        raise BractError(
            f"received no amount to decrypt ({error})", code="message-malformed"
        ) from error


def _record(content: RecordDict, name: str) -> ArrayRecord:
    if name not in content.array_records:
        raise BractError(f"was sent no {name} to decrypt", code="message-malformed")
    return content.array_records[name]
