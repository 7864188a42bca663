"""Threshold decryption, the server's part: ask for partial decryptions and pass them on, sealed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from bract.ciphertexts import EncryptedUpdate, readable
from bract.errors import BractError, RunFailedError
from bract.keyexchange import (
    COUNT_KEY,
    PARTIAL_TYPE,
    RECIPIENTS,
    TAG_KEY,
    stripped_name,
    vector_name,
    write_recipients,
)
from bract.logs import log_progress
from bract.paillier import strip_messages
from bract.partials import SealedPartials, write_bundle
from bract.records import CONFIG, Failure
from bract.strategies.admission import Admission
from bract.strategies.net import Net

_log = logging.getLogger(__name__)


class ThresholdDecryption:
    """Collect the help of ``t`` clients for what all of them may read.

    Parameters
    ----------
    admission
        Who takes part, under which key.
    net
        How clients are reached.
    """

    def __init__(self, admission: Admission, net: Net) -> None:
        self._admission = admission
        self._net = net
        self._bundles: dict[str, list[SealedPartials]] = {}

    def content(self, tag: str, aggregates: Sequence[ArrayRecord], recipient: int) -> RecordDict:
        """Return the records with which one client decrypts ``aggregates``.

        The clients are asked once for a tag, and again where a recipient came later.

        Raises
        ------
        RunFailedError
            If fewer clients than the threshold answer.
        """
        if any(recipient not in sealed.boxes for sealed in self._bundles.get(tag, ())):
            del self._bundles[tag]
        if tag not in self._bundles:
            self._bundles[tag] = self._collect(tag, aggregates)
        return write_bundle(tag, self._bundles[tag], recipient)

    def forget(self, recipient: int | None = None) -> None:
        """Drop what was collected: all of it, or what is sealed for a client that lost its key."""
        self._bundles = {
            tag: bundle
            for tag, bundle in self._bundles.items()
            if recipient is not None and all(recipient not in sealed.boxes for sealed in bundle)
        }

    def _collect(self, tag: str, aggregates: Sequence[ArrayRecord]) -> list[SealedPartials]:
        here = self._net.connected()
        members = {n: hello for n, hello in self._admission.members.items() if n in here}
        config = ConfigRecord(
            {**self._admission.instructions, TAG_KEY: tag, COUNT_KEY: len(aggregates)}
        )
        identities = {node: hello.identity for node, hello in members.items()}
        content = RecordDict({CONFIG: config, RECIPIENTS: write_recipients(identities)})
        for index, aggregate in enumerate(aggregates):
            content[vector_name(index)] = aggregate
            content[stripped_name(index)] = self._strip(aggregate)
        answers, failures = self._net.ask(dict.fromkeys(members, content), PARTIAL_TYPE)
        sealed = []
        for node_id, message in answers.items():
            try:
                sealed.append(SealedPartials.read(message, node_id))
            except BractError as error:
                failures.append(Failure(node_id, members[node_id].client, str(error)))
        for failure in failures:
            _log.error("%s: %s did not help to decrypt: %s", tag, failure.client, failure.reason)
        need = self._admission.config.threshold
        assert need is not None
        if len(sealed) < need:
            lost = "; ".join(f"{f.client}: {f.reason}" for f in failures)
            raise RunFailedError(
                f"{tag}: {len(sealed)} of {len(members)} clients helped to decrypt, "
                f"encryption.threshold needs {need} ({lost or 'too few are connected'}); restart "
                "the missing clients and resume the run"
            )
        return sorted(sealed, key=lambda s: s.sender)[:need]

    def _strip(self, aggregate: ArrayRecord) -> ArrayRecord:
        public = self._admission.public
        vectors = EncryptedUpdate.from_record(aggregate).vectors
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
