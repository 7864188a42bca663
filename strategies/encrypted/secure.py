"""Encrypted aggregation: FedAvg, FedProx and FedBoosting over ciphertexts.

The server holds the public key, the clients' ciphertexts and the public weights. It sends round r's
aggregate with the train message of round r+1, and the last one in a phase of its own, so a run of R
rounds has the phases of a plain one and three more: one before it, in which the clients announce
their keys (two where the key itself travels in-band), and one after it. With a threshold, every
decryption costs one more phase.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from bract.captures.aggregates import Aggregates
from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.installed.versions import release
from bract.paillier.weights import integer_weights
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.ciphertexts import EncryptedUpdate, combine_updates, readable
from bract.protocol.keyexchange import CONTINUES_KEY, SESSION_KEY, fused_tag, is_hello
from bract.protocol.records import (
    ROUND_KEY,
    VERSION_KEY,
    Contribution,
    Failure,
    is_encrypted_reply,
    read_final,
    who_failed,
)
from bract.strategies.encrypted.catch_up import CatchUp
from bract.strategies.encrypted.forms import of_one_form
from bract.strategies.encrypted.membership import Membership
from bract.strategies.encrypted.powers import SentPowers
from bract.strategies.encrypted.transport import Transport
from bract.strategies.encrypted.validation import check_ciphertexts
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx

_log = logging.getLogger(__name__)


class EncryptedFedAvg(FedAvg):
    """FedAvg whose server never holds a plain update, nor the plain global model.

    Weights are the integers closest to the strategy's shares (`bract.paillier.integer_weights`),
    and their true sum divides. A client that lacks the key or an aggregate reports that in place of
    an update, and is asked again in the same round with what it lacks.

    Parameters
    ----------
    encryption
        How updates are encrypted.
    aggregates
        Folder of the aggregates; in memory if not given.
    timeout
        Seconds to wait for answers in the phases besides training.
    options
        As the plain strategy takes them.

    Attributes
    ----------
    final
        Each client's measurements of the final model, by name, after `start`.
    """

    def __init__(
        self,
        *,
        encryption: EncryptionConfig,
        aggregates: Aggregates | None = None,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.encryption = encryption
        self.aggregates = aggregates or Aggregates()
        self.final: dict[str, dict[str, float]] = {}
        self._transport = Transport(self.pair, timeout, lambda: self.closing.still_busy())
        self._membership = Membership(
            encryption,
            self._transport,
            clients=self.min_available_nodes,
            names=self.names,
            aggregates=self.aggregates,
        )
        self._catching_up = CatchUp(self._membership, self.aggregates, self._transport)
        self._updates: dict[int, EncryptedUpdate] = {}
        self._powers = SentPowers(self.names)
        self._left_out: tuple[Failure, ...] = ()
        self._gathered = False

    def begin(self, initial: ArrayRecord) -> None:
        """Keep the initial model, which clients without a model are sent."""
        self.aggregates.begin(from_arrays(initial))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Admit new clients, and ask a sample of the nodes to train.

        Raises
        ------
        RunFailedError
            If a client holds no key or another run's, and failures are not tolerated.
        """
        self.aggregates.begin(from_arrays(arrays))
        config[SESSION_KEY] = self.aggregates.session
        messages = list(super().configure_train(server_round, ArrayRecord(), config, grid))
        self._prepare(grid, config)
        number = server_round + self.first_round - 1
        sampled = [m.metadata.dst_node_id for m in messages]
        members = [node for node in sampled if node in self._membership.members]
        self._asked = self._train_messages(members, number)
        return self._asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the ciphertexts received.

        Raises
        ------
        RunFailedError
            As in the plain strategy.
        """
        number = server_round + self.first_round - 1
        self._updates = {}
        replies = self._catch_up(list(replies), number)
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self._asked}
        for node in (asked.get(m.metadata.reply_to_message_id) for m in replies if m.has_error()):
            if node is not None:
                self._membership.refuse_box(node)
        aggregate, metrics = super().aggregate_train(server_round, replies)
        if aggregate is not None:
            self.aggregates.append(from_arrays(aggregate))
        for node_id in self._updates:
            self._membership.holds(node_id, number - 1)
        self._updates = {}
        self._catching_up.forget_help()
        return aggregate, metrics

    def deliver(self, grid: Grid, config: ConfigRecord) -> None:
        """Send the last aggregate to every client, which judges the final model and keeps it.

        Raises
        ------
        RunFailedError
            If a client cannot take it, and failures are not tolerated.
        """
        number = self.aggregates.last + 1
        config[SESSION_KEY] = self.aggregates.session
        config[ROUND_KEY] = number
        self._prepare(grid, config)
        answers, failures = self._catching_up.finish(number)
        self.final = {}
        for node_id, message in answers.items():
            try:
                client, metrics = read_final(message)
                self.final[client] = metrics
            except BractError as error:
                failures.append(self.failure(node_id, str(error)))
        for failure in failures:
            _log.error("final model: %s failed: %s", failure.client, failure.reason)
        if failures and (not self.tolerate_failures or not self.final):
            who = who_failed(failures)
            raise RunFailedError(f"the final model was not taken by every client: {who}")

    def is_update(self, message: Message) -> bool:
        """Return whether a reply has the form of ciphertexts, and is no `Hello`."""
        return is_encrypted_reply(message) and not is_hello(message)

    def read(self, message: Message) -> Contribution:
        """Read one client's answer; its ciphertexts are checked one by one."""
        if is_hello(message):
            raise BractError(
                "cannot follow, though it was sent the key and every aggregate again",
                code="state-lost",
            )
        contribution = super().read(message)
        if not contribution.ciphertexts:
            raise BractError(
                "sent an update that is not encrypted; it was thrown away", code="update-refused"
            )
        return contribution

    def check(self, contribution: Contribution) -> None:
        """Refuse ciphertexts that would spoil the sum.

        Raises
        ------
        BractError
            If they are truncated, out of range, of another key, layout or model, or came with
            powers that are not theirs.
        """
        update = EncryptedUpdate.from_tensors(contribution.ciphertexts)
        powers = {part: value.numpy() for part, value in contribution.powers.items()}
        update = replace(update, powers=powers)
        initial = self.aggregates.initial
        check_ciphertexts(update, self._membership.public, self.encryption, initial)
        self._powers.check(contribution.node_id, update, self._membership.public)
        self._updates[contribution.node_id] = update

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the shares that the integer weights represent; they sum to 1."""
        shares = super().weigh(contributions)
        integers = self._integers(shares)
        return [weight / sum(integers) for weight in integers]

    def combine(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> ArrayRecord:
        """Return the encryption of ``sum_i weights[i] update_i``."""
        updates = [self._updates[c.node_id] for c in contributions]
        public = self._membership.public
        total = combine_updates(public, updates, self._integers(weights))
        total = self._powers.settle(total, self._updates, public)
        record = to_arrays(total.to_tensors())
        self._catching_up.remember(record, total)
        return record

    def _prepare(self, grid: Grid, config: ConfigRecord) -> None:
        self._transport.grid = grid
        config[VERSION_KEY] = release()
        config[CONTINUES_KEY] = list(self.aggregates.enter(grid.run.run_id))
        self._membership.instructions = ConfigRecord(dict(config))
        left_out = self._membership.admit()
        if not self._gathered:
            left_out = self._gather(left_out)
            self._gathered = True
        self._left_out = tuple(left_out)
        members = self._membership.members
        for failure in self._left_out:
            _log.error("%s takes no part: %s", failure.client, failure.reason)
        if self._membership.full:
            self._left_out = ()  # all clients of the run are there: further nodes are not clients
        if self._left_out and (not self.tolerate_failures or not members):
            who = who_failed(self._left_out)
            raise RunFailedError(f"keys: {who}")

    def _gather(self, failures: Iterable[Failure]) -> list[Failure]:
        """Wait until every client of the run was greeted; return who could not be admitted.

        Right after a restart of the SuperLink its database names clients that have left. Who left
        before it answered is waited for; who answered and was refused is not.
        """
        refused = {failure.node_id: failure for failure in failures}

        def greeted() -> list[str]:
            here = self._transport.connected()
            for node in set(refused) - here:
                del refused[node]
            if here - set(self._membership.members) - set(refused):
                refused.update({failure.node_id: failure for failure in self._membership.admit()})
                here = self._transport.connected()
            return [self.names.of(n) for n in here & (set(self._membership.members) | set(refused))]

        self.waiting.until(greeted, self._membership.clients)
        return list(refused.values())

    def _train_messages(self, nodes: Iterable[int], number: int) -> list[Message]:
        contents, failures = self._catching_up.contents(nodes, number)
        self._left_out += tuple(failures)
        return [
            Message(content, message_type=MessageType.TRAIN, dst_node_id=node)
            for node, content in contents.items()
        ]

    def _catch_up(self, replies: list[Message], number: int) -> list[Message]:
        """Ask clients again that could not follow; return all final answers."""
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self._asked}
        behind = {
            asked[request]: m
            for m in replies
            if (request := m.metadata.reply_to_message_id) in asked and is_hello(m)
        }
        if not behind:
            return replies
        names = ", ".join(self.names.of(node) for node in behind)
        _log.warning("round %d: %s could not follow; sent again what it lacks", number, names)
        self._left_out += tuple(self._catching_up.readmit(behind))
        members = self._membership.members
        again = self._train_messages([n for n in behind if n in members], number)
        self._asked = [m for m in self._asked if m.metadata.dst_node_id not in behind] + again
        answered = [m for m in replies if not is_hello(m)]
        return answered + self._transport.send(again)

    def _read(
        self, replies: Iterable[Message]
    ) -> tuple[tuple[Contribution, ...], tuple[Failure, ...]]:
        contributions, failures = super()._read(replies)
        forms = [self._updates[c.node_id].shapes for c in contributions]
        contributions, others = of_one_form(contributions, forms)
        failures += tuple(
            self.failure(c.node_id, "encrypted the tensors in another order than the others")
            for c in others
        )
        return contributions, failures + self._left_out

    def _integers(self, shares: Sequence[float]) -> list[int]:
        with readable():
            return integer_weights(shares, self.encryption.max_weight_sum)


class EncryptedFedProx(EncryptedFedAvg, FedProx):
    """FedProx over ciphertexts; see `EncryptedFedAvg`."""


class EncryptedFedBoosting(EncryptedFedAvg, FedBoosting):
    """FedBoosting over ciphertexts; see `EncryptedFedAvg`.

    Fused models are integer linear combinations of ciphertexts (thesis, eq. 4.5), which the
    clients decrypt to score them. Every client can read every fused model, so what `fusing_weights`
    states on how little fusing hides from the other clients holds here too.
    """

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the shares that the integer weights represent, and record those."""
        weights = super().weigh(contributions)
        assert self._boosting is not None
        self._boosting = replace(self._boosting, weights=tuple(weights))
        return weights

    def ask_validators(self, nodes: Sequence[int], models: Sequence[ArrayRecord]) -> list[Message]:
        """Return the messages with the fused models, and with what a client needs to decrypt them.

        Raises
        ------
        RunFailedError
            If fewer clients than the threshold help.
        """
        if self.fusing == "random":
            models = [_without_parts(model) for model in models]
        messages = []
        for message in super().ask_validators(nodes, models):
            node_id = message.metadata.dst_node_id
            tag = fused_tag(self.outcome.server_round)
            try:
                help_of_others = self._catching_up.help(tag, models, node_id)
            except RunFailedError:
                raise
            except BractError as error:
                _log.error("%s is no validator: %s", self.names.of(node_id), error)
                continue
            message.content = RecordDict({**message.content, **help_of_others})
            messages.append(message)
        return messages


def _without_parts(model: ArrayRecord) -> ArrayRecord:
    """Return a fused model without the weights with which it was made.

    Decryption then takes the slow way. The weights of a threshold's ciphertexts are nowhere.
    """
    update = EncryptedUpdate.from_tensors(from_arrays(model))
    if not any(vector.parts for vector in update.vectors.values()):
        return model
    vectors = {part: replace(vector, parts=()) for part, vector in update.vectors.items()}
    return to_arrays(replace(update, vectors=vectors).to_tensors())


def encrypted(kind: type[FedAvg]) -> type[EncryptedFedAvg]:
    """Return the strategy over ciphertexts that represents a plain one."""
    kinds: dict[type[FedAvg], type[EncryptedFedAvg]] = {
        FedAvg: EncryptedFedAvg,
        FedProx: EncryptedFedProx,
        FedBoosting: EncryptedFedBoosting,
    }
    return kinds[kind]
