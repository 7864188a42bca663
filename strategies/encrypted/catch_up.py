"""What each client of an encrypted run is sent, so that all have the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, Message, RecordDict

from bract.captures.aggregates import Aggregates
from bract.errors import BractError, RunFailedError
from bract.protocol.arrays import to_arrays, to_packed
from bract.protocol.ciphertexts import EncryptedUpdate
from bract.protocol.keyexchange import FINAL_TYPE, KEY_BOX, aggregate_name, is_hello, round_tag
from bract.protocol.records import ARRAYS, CONFIG, Failure
from bract.strategies.encrypted.decryption import ThresholdDecryption
from bract.strategies.encrypted.membership import Membership
from bract.strategies.encrypted.transport import Transport

MOST_SENT = 10
"""Aggregates that the clients of one partition are sent for each round of the run, in the mean: a
client that loses its state in each of R rounds, or whose answers fail, would else cost the others
R^2/2 decryptions."""


class CatchUp:
    """Bring clients up to date: initial model, key box, aggregates, and help to decrypt them.

    Parameters
    ----------
    membership
        The members, and the progress of each.
    aggregates
        The aggregates.
    transport
        How clients are reached.
    """

    def __init__(
        self, membership: Membership, aggregates: Aggregates, transport: Transport
    ) -> None:
        self._membership = membership
        self._aggregates = aggregates
        self._transport = transport
        self._sent: Counter[int] = Counter()
        self._threshold = (
            None
            if membership.config.threshold is None
            else ThresholdDecryption(membership, transport)
        )

    def content(self, node_id: int, number: int) -> RecordDict:
        """Return what a client needs to begin round ``number`` from its present state.

        Raises
        ------
        BractError
            If a decryption needs the help of others and this client refused too many of them, or
            if its partition was sent more aggregates than `MOST_SENT` a round.
        RunFailedError
            If fewer clients than the threshold help.
        """
        content = RecordDict({CONFIG: self._membership.instructions})
        held = self._membership.members[node_id].model_round
        if held < 0:
            content[ARRAYS] = to_packed(self._aggregates.initial)
        if node_id in self._membership.boxes:
            content[KEY_BOX] = self._membership.boxes[node_id]
        lacking = range(max(held, 0) + 1, number)
        self._count(node_id, len(lacking), number)
        for earlier in lacking:
            aggregate = to_arrays(self._aggregates.aggregate(earlier))
            content[aggregate_name(earlier)] = aggregate
            content.update(self.help(round_tag(earlier), [aggregate], node_id))
        return content

    def _count(self, node_id: int, lacking: int, number: int) -> None:
        """Count the aggregates that a client is about to be sent; refuse it in this round if many.

        The bound grows with the rounds, so a client that keeps its state is asked again.
        """
        partition = self._membership.members[node_id].partition
        sent = self._sent[partition] + lacking
        if sent > MOST_SENT * number:
            raise BractError(
                f"lacks {lacking} aggregates, and was sent {self._sent[partition]} in {number} "
                f"rounds, of {MOST_SENT * number} at most: it does not keep its state, or its "
                "answers fail; set state-dir in its node config",
                code="state-lost",
            )
        self._sent[partition] = sent

    def help(self, tag: str, aggregates: Sequence[ArrayRecord], node_id: int) -> RecordDict:
        """Return the partial decryptions of ``aggregates`` for a client; none without a threshold.

        Raises
        ------
        BractError, RunFailedError
            As `content`.
        """
        if self._threshold is None:
            return RecordDict()
        return self._threshold.content(tag, aggregates, node_id)

    def remember(self, aggregate: ArrayRecord, total: EncryptedUpdate) -> None:
        """Keep the powers of an aggregate, where the clients sent those of its parts."""
        if self._threshold is not None and total.powers:
            self._threshold.remember(aggregate, total.powers)

    def forget_help(self) -> None:
        """Drop the partial decryptions of a round that is over."""
        if self._threshold is not None:
            self._threshold.forget()

    def readmit(self, behind: Mapping[int, Message]) -> list[Failure]:
        """Take clients in again that reported that they cannot follow.

        Returns
        -------
        list of Failure
            The clients that could not be admitted, and why.
        """
        members = self._membership.members
        before = {node_id: members[node_id].identity for node_id in behind}
        failures = self._membership.readmit(behind)
        if self._threshold is None:
            return failures
        for node_id, identity in before.items():
            if node_id not in members or members[node_id].identity != identity:
                self._threshold.forget(node_id)
            else:
                self._threshold.refuse(node_id, members[node_id].refused)
        return failures

    def finish(self, number: int) -> tuple[dict[int, Message], list[Failure]]:
        """Send what is left before round ``number`` to every client that is there, the last time.

        Returns
        -------
        tuple of dict and list
            The clients' words on the final model by node id, and the failed clients.
        """
        connected = self._transport.connected()
        nodes = [node for node in self._membership.members if node in connected]
        answers, failures = self._finish(nodes, number)
        behind = {node: message for node, message in answers.items() if is_hello(message)}
        if behind:
            failures += self.readmit(behind)
            back = [node for node in behind if node in self._membership.members]
            again, lost = self._finish(back, number)
            answers = {n: m for n, m in answers.items() if n not in behind} | again
            failures += lost
        return answers, failures

    def _finish(
        self, nodes: Iterable[int], number: int
    ) -> tuple[dict[int, Message], list[Failure]]:
        contents, failures = self.contents(nodes, number)
        answers, lost = self._transport.ask(contents, FINAL_TYPE)
        return answers, failures + lost

    def contents(
        self, nodes: Iterable[int], number: int
    ) -> tuple[dict[int, RecordDict], list[Failure]]:
        """Return `content` by node id, and whom it cannot be given.

        Raises
        ------
        RunFailedError
            As `content`.
        """
        contents, failures = {}, []
        for node in nodes:
            try:
                contents[node] = self.content(node, number)
            except RunFailedError:
                raise
            except BractError as error:
                client = self._membership.members[node].client
                failures.append(Failure(node, client, str(error)))
        return contents, failures
