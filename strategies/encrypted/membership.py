"""The members of an encrypted run, and their key; its first phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flwr.app import ConfigRecord, Message, RecordDict

from bract.captures.aggregates import Aggregates
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.paillier import PublicKey
from bract.paillier.exchange import make_identity
from bract.paillier.keyfile import load_public
from bract.protocol.ciphertexts import readable
from bract.protocol.keyexchange import (
    CHALLENGE_KEY,
    DEAL_TYPE,
    HELLO_TYPE,
    RECIPIENTS,
    SESSION_KEY,
    Hello,
    read_dealt,
    write_key_box,
    write_recipients,
)
from bract.protocol.node_names import ClientNames
from bract.protocol.records import CONFIG, Failure, who_failed
from bract.strategies.encrypted.transport import Transport

_log = logging.getLogger(__name__)


class Membership:
    """The clients that hold the run's key, and the key's public half.

    A run has as many seats as it declares clients, one for each partition. A seat is its first
    client's, known by its node id or its X25519 identity, until that client has left; where the key
    travels in-band, and so was given to that client, no other client gets the seat. The client
    whose identity ``encryption.identities`` lists at the place of a partition takes that seat from
    any other. Each client proves that it holds the private half of the identity that it announces.

    Parameters
    ----------
    config
        How updates are encrypted.
    transport
        How clients are reached.
    clients
        Number of clients that the run declares.
    names
        Whose names are whose.
    aggregates
        Keeps the public key for a server that is restarted.

    Attributes
    ----------
    members
        The admitted clients, by node id.
    boxes
        Key boxes that wait for their recipients, as they travel in the next train message.
    """

    def __init__(
        self,
        config: EncryptionConfig,
        transport: Transport,
        *,
        clients: int,
        names: ClientNames,
        aggregates: Aggregates,
    ) -> None:
        self.config = config
        self.clients = clients
        self._transport = transport
        self._names = names
        self._aggregates = aggregates
        self._instructions = ConfigRecord()
        self._challenge = make_identity()
        self.members: dict[int, Hello] = {}
        self.boxes: dict[int, ConfigRecord] = {}
        self._sealed_for: dict[int, bytes] = {}
        self._refused: Counter[tuple[int, int]] = Counter()
        self._seats: dict[int, Hello] = {}
        self._public: PublicKey | None = None

    @property
    def instructions(self) -> ConfigRecord:
        """The config record that every message of the run carries, a challenge among it."""
        challenge = {CHALLENGE_KEY: self._challenge.public.hex()}
        return ConfigRecord({**self._instructions, **challenge})

    @instructions.setter
    def instructions(self, instructions: ConfigRecord) -> None:
        self._instructions, self._challenge = instructions, make_identity()

    @property
    def public(self) -> PublicKey:
        """The run's public key."""
        assert self._public is not None, "no client was admitted"
        return self._public

    @property
    def full(self) -> bool:
        """Return whether every declared client was admitted and is connected."""
        return len(set(self.members) & self._transport.connected()) >= self.clients

    def admit(self) -> list[Failure]:
        """Greet the connected nodes that are not members yet; give the key to clients without it.

        Returns
        -------
        list of Failure
            The clients that could not be admitted, and why.

        Raises
        ------
        RunFailedError
            As `readmit`.
        """
        newcomers = sorted(self._transport.connected() - set(self.members))
        if not newcomers:
            return []
        content = RecordDict({CONFIG: self.instructions})
        answers, failures = self._transport.ask(dict.fromkeys(newcomers, content), HELLO_TYPE)
        return failures + self._register(answers)

    def readmit(self, behind: Mapping[int, Message]) -> list[Failure]:
        """Admit members anew that reported, by node id, that they hold less than was thought.

        Raises
        ------
        RunFailedError
            If the clients hold different keys and the run's is not declared, or no client
            generates one.
        """
        for node_id in behind:
            del self.members[node_id]
        return self._register(behind)

    def holds(self, node_id: int, model_round: int) -> None:
        """Note that a member has answered, so it has the key and the model after that round."""
        self.boxes.pop(node_id, None)
        self.members[node_id] = replace(self.members[node_id], model_round=model_round)

    def refuse_box(self, node_id: int) -> None:
        """Drop the key box of a client that answered it with an error, and its sender for it.

        The server cannot open a box, so a member could bar a newcomer by one that does not open.
        The client is greeted anew in the next round, and other members are asked first.
        """
        box = self.boxes.pop(node_id, None)
        if box is None:
            return
        self._refused[node_id, int(str(box["sender"]))] += 1
        self.members.pop(node_id, None)

    def _register(self, answers: Mapping[int, Message]) -> list[Failure]:
        """Admit clients that have announced themselves, by node id."""
        arrived, failures = [], []
        for node_id, message in sorted(answers.items()):
            try:
                hello = Hello.read(message, node_id)
                hello.check_proof(self._challenge, self._session)
                self._names.claim(node_id, hello.client, self._transport.connected)
                displaced = self._take_seat(hello)
                arrived.append(hello)
                if displaced is not None:
                    arrived = _without(arrived, [displaced])
                    failures.append(displaced)
            except BractError as error:
                failures.append(Failure(node_id, self._names.of(node_id), str(error)))
        arrived.sort(key=lambda h: (h.partition, h.node_id))
        failures += self._settle_key(arrived)
        if self.config.keys == "in-band":
            failures += self._hand_over(_without(arrived, failures))
        for hello in _without(arrived, failures):
            self.members[hello.node_id] = hello
        return failures

    @property
    def _session(self) -> str:
        return str(self._instructions.get(SESSION_KEY, ""))

    def _take_seat(self, hello: Hello) -> Failure | None:
        """Give a client the seat of its partition; return who has to leave it, and why."""
        if not 0 <= hello.partition < self.clients:
            raise BractError(
                f"claims partition {hello.partition}, this run has the partitions 0 to "
                f"{self.clients - 1}; correct partition-id in its node config, or `clients`",
                code="identity-refused",
            )
        allowed = self.config.identities
        if allowed and hello.identity.hex() not in allowed:
            raise BractError(
                f"has the identity {hello.identity.hex()}, which is not in encryption.identities; "
                "add it, or set identity-key in the client's node config",
                code="identity-refused",
            )
        others = self._transport.connected() - {hello.node_id}
        for seat in self._seats.values():
            if seat.identity == hello.identity and seat.node_id in others:
                raise BractError(
                    f"has the identity {hello.identity.hex()} of {seat.client}; give each client "
                    "an identity-key of its own",
                    code="identity-refused",
                )
        earlier = next((p for p, h in self._seats.items() if h.node_id == hello.node_id), None)
        if earlier not in (None, hello.partition):
            raise BractError(
                f"claims partition {hello.partition}, before {earlier}", code="identity-refused"
            )
        holder, displaced = self._seats.get(hello.partition), None
        if holder is not None and holder.node_id != hello.node_id:
            if self._belongs(hello) and not self._belongs(holder):
                displaced = Failure(holder.node_id, holder.client, _not_its_seat(holder, hello))
                self.boxes.pop(holder.node_id, None)
            else:
                self._require_heir(holder, hello)
            self.members.pop(holder.node_id, None)
        self._seats[hello.partition] = hello
        return displaced

    def _belongs(self, hello: Hello) -> bool:
        """Return whether the configuration lists a client's identity at its partition's place."""
        return self.config.identities[hello.partition : hello.partition + 1] == (
            hello.identity.hex(),
        )

    def _require_heir(self, holder: Hello, hello: Hello) -> None:
        if holder.node_id in self._transport.connected():
            raise BractError(
                f"claims partition {hello.partition}, which is {holder.client}'s; this "
                f"run has {self.clients} clients, each with a partition-id of its own",
                code="identity-refused",
            )
        if self.config.keys == "in-band" and holder.identity != hello.identity:
            raise BractError(
                f"wants the seat of {holder.client}, which has left with the run's key, and cannot "
                "show that it is the same client; give clients state-dir or identity-key, or turn "
                "SuperNode authentication on",
                code="identity-refused",
            )

    def _settle_key(self, arrived: list[Hello]) -> list[Failure]:
        """Choose the run's key, once; name clients that hold another."""
        if self._public is None and self._aggregates.key:
            with readable():
                self._public = load_public(self._aggregates.key)
        if self._public is None and self.config.keys == "provisioned":
            self._choose_key([hello for hello in arrived if hello.key])
        wanted = "none was dealt yet" if self._public is None else f"this run's is {self._id}"
        return [
            Failure(
                hello.node_id,
                hello.client,
                f"holds Paillier key {hello.key_id}, {wanted}; give this client the key file of "
                "this run",
            )
            for hello in arrived
            if not self._lacks_key(hello) and hello.key_id != self._id
        ]

    def _lacks_key(self, hello: Hello) -> bool:
        """Return whether a client holds no key, or one that it generated and this run never used.

        A provisioned key is never replaced, whatever the client claims.
        """
        unused = self.config.keys == "in-band" and hello.unconfirmed
        return not hello.key or (unused and hello.key_id != self._id)

    def _choose_key(self, holders: list[Hello]) -> None:
        """Take the configured key, else the one that most clients hold."""
        texts = {hello.key_id: hello.key for hello in holders}
        held = Counter(hello.key_id for hello in holders)
        if self.config.key_id is not None:
            held = Counter({i: count for i, count in held.items() if i == self.config.key_id})
        if not held:
            return
        (chosen, most), *others = held.most_common()
        if others and others[0][1] == most:
            who = "; ".join(f"{h.client}: {h.key_id}" for h in holders)
            raise RunFailedError(
                f"the clients hold different Paillier keys ({who}); provision the files of "
                "one `bract keygen`, or set encryption.key_id",
                code="key-mismatch",
            )
        self._set_key(texts[chosen])

    def _set_key(self, text: bytes) -> None:
        with readable():
            self._public = load_public(text)
        self._aggregates.key = text

    @property
    def _id(self) -> str | None:
        return None if self._public is None else self._public.key_id

    def _hand_over(self, arrived: list[Hello]) -> list[Failure]:
        """Have the key generated, or handed on, for those of ``arrived`` that lack it."""
        failures: list[Failure] = []
        lacking = [hello for hello in arrived if self._lacks_key(hello) and not self._served(hello)]
        if self._public is None:
            for position, dealer in enumerate(lacking):
                # Who failed to deal gets a box as well: one that was killed asks for it again.
                others = lacking[position + 1 :] and _without(lacking, [dealer])
                reason = self._deal(dealer, others)
                if reason is None:
                    break
                failures.append(Failure(dealer.node_id, dealer.client, reason))
            if failures and self._public is None:
                who = who_failed(failures)
                raise RunFailedError(f"no client generated the key ({who})")
            return failures
        if not lacking:
            return failures
        present = self._transport.connected() - {hello.node_id for hello in lacking}
        holders = [self.members[n] for n in sorted(set(self.members) & present)]
        holders += [hello for hello in arrived if not self._lacks_key(hello)]
        holders.sort(key=lambda one: sum(self._refused[h.node_id, one.node_id] for h in lacking))
        reasons = []
        for holder in holders:
            reason = self._deal(holder, lacking)
            if reason is None:
                return failures
            _log.error("%s did not hand over the key: %s", holder.client, reason)
            reasons.append(f"{holder.client} did not hand over the key: {reason}")
        why = reasons[0] if reasons else "no client that holds the key is connected"
        return [Failure(hello.node_id, hello.client, why) for hello in lacking]

    def _deal(self, holder: Hello, lacking: list[Hello]) -> str | None:
        """Ask one client for the key; return what was wrong with its answer, None if nothing."""
        recipients = {h.node_id: h.identity for h in lacking}
        if not recipients:
            return "there is no client left to seal the key for"
        content = RecordDict({CONFIG: self.instructions, RECIPIENTS: write_recipients(recipients)})
        verb = "generates" if self._public is None else "passes on"
        _log.info("%s %s the Paillier key for %d clients", holder.client, verb, len(recipients))
        answers, failures = self._transport.ask({holder.node_id: content}, DEAL_TYPE)
        if failures:
            return failures[0].reason
        try:
            text, boxes = read_dealt(answers[holder.node_id])
            with readable():
                public = load_public(text)
        except BractError as error:
            return str(error)
        section = self.config
        if public.bits != section.key_bits or (section.randomness == "djn" and public.h is None):
            return f"generated a key of {public.bits} bits for {public.randomness} randomness"
        if self._id is not None and public.key_id != self._id:
            return f"handed over key {public.key_id}, this run's is {self._id}"
        if section.key_id is not None and public.key_id != section.key_id:
            return f"generated key {public.key_id}, encryption.key_id is {section.key_id}"
        missing = [h.client for h in lacking if h.node_id not in boxes]
        if missing:
            return f"sealed no key for {', '.join(missing)}"
        if self._public is None:
            self._set_key(text)
        self.boxes |= {
            node: write_key_box(holder.node_id, holder.identity, boxes[node]) for node in recipients
        }
        self._sealed_for |= recipients
        return None

    def _served(self, hello: Hello) -> bool:
        """Return whether a box that this client can open waits for it."""
        box_waits = hello.node_id in self.boxes
        return box_waits and self._sealed_for[hello.node_id] == hello.identity


def _not_its_seat(holder: Hello, owner: Hello) -> str:
    return (
        f"claims partition {holder.partition}, which encryption.identities gives to {owner.client} "
        "by its place in the list; set this client's own partition-id in its node config"
    )


def _without(arrived: list[Hello], left_out: Sequence[Hello | Failure]) -> list[Hello]:
    refused = {one.node_id for one in left_out}
    return [hello for hello in arrived if hello.node_id not in refused]
