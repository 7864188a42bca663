"""Threshold decryption, the server's part: ask for partial decryptions and pass them on, sealed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from bract.errors import BractError, RunFailedError
from bract.paillier.stripping import strip_messages
from bract.process.logs import log_progress
from bract.protocol.arrays import from_arrays
from bract.protocol.ciphertexts import EncryptedUpdate, readable
from bract.protocol.keyexchange import (
    COUNT_KEY,
    PARTIAL_TYPE,
    RECIPIENTS,
    TAG_KEY,
    stripped_name,
    vector_name,
    write_recipients,
)
from bract.protocol.partials import SealedPartials, write_bundle
from bract.protocol.records import CONFIG, Failure, who_failed
from bract.strategies.encrypted.membership import Membership
from bract.strategies.encrypted.transport import Transport, unlisted

_log = logging.getLogger(__name__)


class ThresholdDecryption:
    """Collect the help of ``t`` clients for what all of them may read.

    Parameters
    ----------
    membership
        The members, and their key.
    transport
        How clients are reached.
    """

    def __init__(self, membership: Membership, transport: Transport) -> None:
        self._membership = membership
        self._transport = transport
        self._bundles: dict[str, list[SealedPartials]] = {}
        self._refused: dict[int, set[int]] = {}
        self._powers: dict[str, dict[str, NDArray[np.uint8]]] = {}

    def content(self, tag: str, aggregates: Sequence[ArrayRecord], recipient: int) -> RecordDict:
        """Return the records with which one client decrypts ``aggregates``.

        The clients are asked once for a tag, and again where a recipient came later. A recipient
        gets nothing of a helper that it has refused: the server cannot read sealed boxes, so a
        client that complains without reason harms itself alone.

        Raises
        ------
        BractError
            If too few helpers are left that this recipient takes.
        RunFailedError
            If fewer clients than the threshold answer.
        """
        if any(recipient not in sealed.boxes for sealed in self._bundles.get(tag, ())):
            del self._bundles[tag]
        if tag not in self._bundles:
            self._bundles[tag] = self._collect(tag, aggregates)
        refused = self._refused.get(recipient, set())
        usable = [sealed for sealed in self._bundles[tag] if sealed.sender not in refused]
        if len(usable) < self._need:
            raise BractError(
                f"{tag}: refused the partial decryptions of {len(refused)} clients, {len(usable)} "
                f"are left and encryption.threshold needs {self._need}",
                code="decryption-refused",
            )
        return write_bundle(tag, usable[: self._need], recipient)

    def refuse(self, recipient: int, helpers: Collection[int]) -> None:
        """Note that a client found the partial decryptions of others damaged or not proven."""
        members = self._membership.members
        known = [node for node in helpers if node in members]
        if not known or recipient not in members:
            return
        self._refused.setdefault(recipient, set()).update(known)
        _log.error(
            "%s refused the partial decryptions of %s: damaged or not proven; it is sent others",
            members[recipient].client,
            ", ".join(members[node].client for node in known),
        )

    def remember(self, aggregate: ArrayRecord, powers: dict[str, NDArray[np.uint8]]) -> None:
        """Keep the powers of an aggregate, by part, from those that its clients sent."""
        name = _name(aggregate)
        self._powers.pop(name, None)  # the newest is the last
        self._powers[name] = powers

    def forget(self, recipient: int | None = None) -> None:
        """Drop what was collected: all of it, or what is sealed for a client that lost its key.

        Of the powers, those of the newest aggregate are kept: the next round opens it.
        """
        if recipient is None:
            self._powers = dict(list(self._powers.items())[-1:])
        self._bundles = {
            tag: bundle
            for tag, bundle in self._bundles.items()
            if recipient is not None and all(recipient not in sealed.boxes for sealed in bundle)
        }

    def _collect(self, tag: str, aggregates: Sequence[ArrayRecord]) -> list[SealedPartials]:
        here = self._transport.connected()
        members = {n: hello for n, hello in self._membership.members.items() if n in here}
        config = ConfigRecord(
            {**self._membership.instructions, TAG_KEY: tag, COUNT_KEY: len(aggregates)}
        )
        identities = {node: hello.identity for node, hello in members.items()}
        content = RecordDict({CONFIG: config, RECIPIENTS: write_recipients(identities)})
        for index, aggregate in enumerate(aggregates):
            content[vector_name(index)] = aggregate
            content[stripped_name(index)] = self._strip(aggregate)
        helpers = sorted(set(members) & self._transport.idle())
        if len(helpers) < self._need:
            helpers = sorted(members)  # who still works on a closed round may yet answer in time
        answers, failures = self._transport.ask(dict.fromkeys(helpers, content), PARTIAL_TYPE)
        sizes = {
            f"{index}.{part}": vector.data.nbytes
            for index, aggregate in enumerate(aggregates)
            for part, vector in EncryptedUpdate.from_tensors(from_arrays(aggregate)).vectors.items()
        }
        sealed = []
        for node_id, message in answers.items():
            try:
                sealed.append(
                    SealedPartials.read(
                        message,
                        node_id,
                        identities[node_id],
                        sizes=sizes,
                        recipients=members,
                    )
                )
            except BractError as error:
                failures.append(Failure(node_id, members[node_id].client, str(error)))
        for failure in failures:
            _log.error("%s: %s did not help to decrypt: %s", tag, failure.client, failure.reason)
        if len(sealed) < self._need:
            lost = who_failed(failures)
            keys = {hello.client: hello.identity for hello in members.values()}
            cause = unlisted(failures, keys, listed=bool(self._membership.config.identities))
            raise RunFailedError(
                f"{tag}: {len(sealed)} of {len(members)} clients helped to decrypt, "
                f"encryption.threshold needs {self._need} ({lost or 'too few are connected'}); "
                f"restart the missing clients and resume the run{cause}",
                code="clients-missing",
            )
        return sorted(sealed, key=lambda s: s.sender)

    @property
    def _need(self) -> int:
        need = self._membership.config.threshold
        assert need is not None
        return need

    def _strip(self, aggregate: ArrayRecord) -> ArrayRecord:
        known = self._powers.get(_name(aggregate))
        if known is not None:
            return ArrayRecord({part: Array(powers) for part, powers in known.items()})
        public = self._membership.public
        vectors = EncryptedUpdate.from_tensors(from_arrays(aggregate)).vectors
        with readable():
            return ArrayRecord(
                {
                    part: Array(
                        strip_messages(
                            public, vector, progress=log_progress(_log, f"preparing {part}")
                        )
                    )
                    for part, vector in vectors.items()
                }
            )


def _name(aggregate: ArrayRecord) -> str:
    digest = hashlib.sha256()
    for part, array in aggregate.items():
        digest.update(f"{part} {len(array.data)} ".encode() + array.data)
    return digest.hexdigest()
