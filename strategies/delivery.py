"""What each client of an encrypted run is sent, so that all stand at the same model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, Message, RecordDict

from bract.keyexchange import FINAL_TYPE, KEY_BOX, aggregate_name, is_hello, round_tag
from bract.records import ARRAYS, CONFIG, Failure
from bract.strategies.admission import Admission
from bract.strategies.decryption import ThresholdDecryption
from bract.strategies.ledger import Ledger
from bract.strategies.net import Net


class Delivery:
    """Bring clients up to date: initial model, key box, aggregates, and help to decrypt them.

    Parameters
    ----------
    admission
        Who takes part, and how far each is.
    ledger
        The aggregates.
    net
        How clients are reached.
    """

    def __init__(self, admission: Admission, ledger: Ledger, net: Net) -> None:
        self._admission = admission
        self._ledger = ledger
        self._net = net
        self._threshold = (
            None if admission.config.threshold is None else ThresholdDecryption(admission, net)
        )

    def content(self, node_id: int, number: int) -> RecordDict:
        """Return what a client needs to begin round ``number`` from where it stands."""
        content = RecordDict({CONFIG: self._admission.instructions})
        held = self._admission.members[node_id].model_round
        if held < 0:
            content[ARRAYS] = self._ledger.initial
        if node_id in self._admission.boxes:
            content[KEY_BOX] = self._admission.boxes[node_id]
        for earlier in range(max(held, 0) + 1, number):
            aggregate = self._ledger.aggregate(earlier)
            content[aggregate_name(earlier)] = aggregate
            content.update(self.help(round_tag(earlier), [aggregate], node_id))
        return content

    def help(self, tag: str, aggregates: Sequence[ArrayRecord], node_id: int) -> RecordDict:
        """Return the partial decryptions of ``aggregates`` for a client; none without a threshold.

        Raises
        ------
        RunFailedError
            If fewer clients than the threshold answer.
        """
        if self._threshold is None:
            return RecordDict()
        return self._threshold.content(tag, aggregates, node_id)

    def forget_help(self) -> None:
        """Drop the partial decryptions of a round that is over."""
        if self._threshold is not None:
            self._threshold.forget()

    def readmit(self, behind: Mapping[int, Message]) -> list[Failure]:
        """Take clients in again that said that they cannot follow.

        Returns
        -------
        list of Failure
            Who could not be admitted, and why.
        """
        for node_id in behind:
            if self._threshold is not None:
                self._threshold.forget(node_id)
        return self._admission.readmit(behind)

    def finish(self, number: int) -> tuple[dict[int, Message], list[Failure]]:
        """Send what is left before round ``number`` to every client that is there, the last time.

        Returns
        -------
        tuple of dict and list
            The clients' words on the final model by node id, and who failed.
        """
        connected = self._net.connected()
        nodes = [node for node in self._admission.members if node in connected]
        answers, failures = self._finish(nodes, number)
        behind = {node: message for node, message in answers.items() if is_hello(message)}
        if behind:
            failures += self.readmit(behind)
            back = [node for node in behind if node in self._admission.members]
            again, lost = self._finish(back, number)
            answers = {n: m for n, m in answers.items() if n not in behind} | again
            failures += lost
        return answers, failures

    def _finish(
        self, nodes: Iterable[int], number: int
    ) -> tuple[dict[int, Message], list[Failure]]:
        return self._net.ask({node: self.content(node, number) for node in nodes}, FINAL_TYPE)
