"""Keys for other clients, and help to decrypt for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flwr.app import RecordDict

from bract.ciphertexts import EncryptedUpdate, readable, shaped
from bract.config import FederationConfig
from bract.errors import BractError
from bract.keyexchange import COUNT_KEY, stripped_name, vector_name
from bract.keyfiles import Key, dump_key
from bract.logs import log_progress
from bract.paillier import (
    KeyShare,
    PartialDecryption,
    combine,
    deal,
    generate_keypair,
    partial_decrypt,
)
from bract.records import CONFIG
from bract.update import Tensors

_log = logging.getLogger(__name__)


def deal_keys(
    held: Key | None, recipients: Sequence[int], config: FederationConfig
) -> tuple[Key, dict[int, bytes]]:
    """Return the dealer's own key, generated where none is ``held``, and the others' as text.

    Parameters
    ----------
    recipients
        Node ids of the others.

    Raises
    ------
    BractError
        If shares were dealt before: the dealer has forgotten the whole key.
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
                "state-dir, or provision key files"
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
    """Return what a share makes of the aggregates of a message, by ``<index>.<part>``.

    Raises
    ------
    BractError
        If an aggregate is of another key.
    """
    partials = {}
    for index in range(int(str(content.config_records[CONFIG][COUNT_KEY]))):
        update = EncryptedUpdate.from_record(content.array_records[vector_name(index)])
        stripped = content.array_records[stripped_name(index)]
        for part, vector in update.vectors.items():
            with readable():
                partials[f"{index}.{part}"] = partial_decrypt(
                    share,
                    vector,
                    stripped[part].numpy(),
                    progress=log_progress(_log, f"helping to decrypt {part}"),
                )
    return partials


def join_partials(
    share: KeyShare,
    update: EncryptedUpdate,
    partials: Mapping[str, list[PartialDecryption]],
    index: int,
) -> dict[str, Tensors]:
    """Return the weighted mean that ``t`` partial decryptions give.

    Raises
    ------
    BractError
        If they are too few, or do not belong to ``update``.
    """
    means = {}
    for part, vector in update.vectors.items():
        found = [
            replace(p, data=p.data.reshape(vector.data.shape))
            for p in partials.get(f"{index}.{part}", [])
        ]
        with readable():
            values = combine(
                share.public,
                vector,
                found,
                progress=log_progress(_log, f"decrypting {part}"),
            )
        means[part] = shaped(values, update.shapes[part])
    return means
