"""Who takes part in an encrypted run, under which key; the first phase of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, Message, RecordDict

from bract.ciphertexts import readable
from bract.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.keyexchange import (
    DEAL_TYPE,
    HELLO_TYPE,
    RECIPIENTS,
    Hello,
    read_dealt,
    write_key_box,
    write_recipients,
)
from bract.paillier import PublicKey, load_public
from bract.records import CONFIG, Failure
from bract.strategies.net import Net

_log = logging.getLogger(__name__)


class Admission:
    """The clients that hold the run's key, and the key's public half.

    Parameters
    ----------
    config
        How updates are encrypted.
    net
        How clients are reached.

    Attributes
    ----------
    instructions
        The config record that every message of the run carries.
    members
        Who was admitted, by node id.
    boxes
        Key boxes that wait for their recipients, as they travel in the next train message.
    """

    def __init__(self, config: EncryptionConfig, net: Net) -> None:
        self.config = config
        self._net = net
        self.instructions = ConfigRecord()
        self.members: dict[int, Hello] = {}
        self.boxes: dict[int, ConfigRecord] = {}
        self._public: PublicKey | None = None

    @property
    def public(self) -> PublicKey:
        """The run's public key."""
        assert self._public is not None, "nobody was admitted"
        return self._public

    def admit(self) -> list[Failure]:
        """Greet the connected nodes that are not members yet; hand the key to who lacks it.

        Returns
        -------
        list of Failure
            Who could not be admitted, and why.
        """
        strangers = sorted(self._net.connected() - set(self.members))
        if not strangers:
            return []
        content = RecordDict({CONFIG: self.instructions})
        answers, failures = self._net.ask(dict.fromkeys(strangers, content), HELLO_TYPE)
        return failures + self._register(answers)

    def readmit(self, behind: Mapping[int, Message]) -> list[Failure]:
        """Admit members anew that said, by node id, that they hold less than was thought."""
        for node_id in behind:
            del self.members[node_id]
        return self._register(behind)

    def holds(self, node_id: int, model_round: int) -> None:
        """Note that a member has answered, so it has the key and the model after that round."""
        self.boxes.pop(node_id, None)
        self.members[node_id] = replace(self.members[node_id], model_round=model_round)

    def _register(self, answers: Mapping[int, Message]) -> list[Failure]:
        """Admit clients that have said, by node id, who they are.

        Raises
        ------
        RunFailedError
            If the client that has to generate or hand over the key does not.
        """
        hellos, failures = [], []
        for node_id, message in answers.items():
            try:
                hellos.append(Hello.read(message, node_id))
            except BractError as error:
                failures.append(Failure(node_id, f"node-{node_id}", str(error)))
        arrived = sorted(hellos, key=lambda h: (h.partition, h.node_id))
        failures += self._settle_key(arrived)
        refused = {failure.node_id for failure in failures}
        arrived = [hello for hello in arrived if hello.node_id not in refused]
        if self.config.keys == "in-band":
            without = [hello for hello in arrived if not hello.key]
            if without:
                self._hand_over(without, arrived)
        self.members |= {hello.node_id: hello for hello in arrived}
        return failures

    def _settle_key(self, arrived: list[Hello]) -> list[Failure]:
        """Choose the run's key, once; name who holds another."""
        held = Counter(hello.key for hello in arrived if hello.key)
        if self._public is None and held:
            (text, most), *others = held.most_common()
            if others and others[0][1] == most:
                who = "; ".join(f"{h.client}: {_key_id(h)}" for h in arrived if h.key)
                raise RunFailedError(
                    f"the clients hold different Paillier keys ({who}); provision the files of "
                    "one `bract keygen`"
                )
            with readable():
                self._public = load_public(text)
        return [
            Failure(
                hello.node_id,
                hello.client,
                f"holds Paillier key {_key_id(hello)}, this run's is {self.public.key_id}; give "
                "this client the key file of this run",
            )
            for hello in arrived
            if hello.key and _key_id(hello) != self.public.key_id
        ]

    def _hand_over(self, without: list[Hello], arrived: list[Hello]) -> None:
        lacking = {hello.node_id for hello in without}
        known = sorted(set(self.members) & self._net.connected() - lacking)
        holders = [hello for hello in arrived if hello.key] + [self.members[n] for n in known]
        holder = holders[0] if holders else without[0]
        recipients = {h.node_id: h.identity for h in without if h.node_id != holder.node_id}
        content = RecordDict({CONFIG: self.instructions, RECIPIENTS: write_recipients(recipients)})
        _log.info(
            "%s %s the Paillier key and seals it for %d clients",
            holder.client,
            "hands over" if holders else "generates",
            len(recipients),
        )
        answers, failures = self._net.ask({holder.node_id: content}, DEAL_TYPE)
        if failures:
            raise RunFailedError(
                f"{failures[0].client} did not hand over the key: {failures[0].reason}"
            )
        try:
            text, boxes = read_dealt(answers[holder.node_id])
            with readable():
                public = load_public(text)
        except BractError as error:
            raise RunFailedError(f"{holder.client}: {error}") from error
        missing = [h.client for h in without if h.node_id in set(recipients) - set(boxes)]
        if missing:
            raise RunFailedError(
                f"{holder.client} has no key share for {', '.join(missing)}; `clients` counts "
                "the shares that are dealt"
            )
        self._public = self._public or public
        self.boxes |= {node: write_key_box(holder.node_id, box) for node, box in boxes.items()}


def _key_id(hello: Hello) -> str:
    with readable():
        return load_public(hello.key).key_id
