"""Encrypted aggregation: FedAvg, FedProx and FedBoosting over ciphertexts.

The server holds the public key, the clients' ciphertexts and the public weights. It sends round r's
aggregate with the train message of round r+1, and the last one in a phase of its own, so a run of R
rounds has the phases of a plain one and three more: one before it, in which the clients say which
key they hold (two where the key itself travels in-band), and one after it. With a threshold, every
decryption costs one more phase.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from flwr.serverapp.strategy import Result

import bract
from bract.ciphertexts import EncryptedUpdate, combine_updates, readable
from bract.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.keyexchange import (
    FINAL_TYPE,
    KEY_BOX,
    SESSION_KEY,
    Hello,
    aggregate_name,
    fused_tag,
    is_hello,
    round_tag,
)
from bract.paillier import integer_weights
from bract.records import (
    ARRAYS,
    CONFIG,
    ROUND_KEY,
    VERSION_KEY,
    Contribution,
    Failure,
    from_arrays,
    read_final,
)
from bract.strategies.admission import Admission
from bract.strategies.decryption import ThresholdDecryption
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedboosting import FedBoosting
from bract.strategies.fedprox import FedProx
from bract.strategies.intake import check_ciphertexts
from bract.strategies.ledger import Ledger

_log = logging.getLogger(__name__)


class EncryptedFedAvg(FedAvg):
    """FedAvg whose server never holds a plain update, nor the plain global model.

    Weights are the integers closest to the strategy's shares (`bract.paillier.integer_weights`),
    and their true sum divides. A client that lacks the key or an aggregate says so in place of an
    update, and is asked again in the same round with what it lacks.

    Parameters
    ----------
    encryption
        How updates are encrypted.
    ledger
        Where aggregates are kept; in memory if not given.
    timeout
        Seconds to wait for answers in the phases beside training.
    options
        As the plain strategy takes them.

    Attributes
    ----------
    final
        What each client measured of the final model, by name, after `start`.
    """

    def __init__(
        self,
        *,
        encryption: EncryptionConfig,
        ledger: Ledger | None = None,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.encryption = encryption
        self.ledger = ledger or Ledger()
        self.timeout = timeout
        self.admission = Admission(encryption, self._ask)
        self._threshold = ThresholdDecryption(self.admission, self._ask)
        self.final: dict[str, dict[str, float]] = {}
        self._net: Grid | None = None
        self._updates: dict[int, EncryptedUpdate] = {}
        self._left_out: tuple[Failure, ...] = ()
        self._instructions = ConfigRecord()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds, then deliver the last aggregate.

        Raises
        ------
        RunFailedError
            As `aggregate_train`, or if a client cannot take the final model.
        """
        config = ConfigRecord() if train_config is None else train_config
        self.ledger.begin(initial_arrays)
        result = super().start(
            grid, initial_arrays, num_rounds, timeout, config, evaluate_config, evaluate_fn
        )
        self.deliver(grid, config)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Admit who is new, and ask a sample of the nodes to train.

        Raises
        ------
        RunFailedError
            If a client holds no key or another run's, and failures are not tolerated.
        """
        self.ledger.begin(arrays)
        config[SESSION_KEY] = self.ledger.session
        messages = list(super().configure_train(server_round, ArrayRecord(), config, grid))
        self._prepare(grid, config)
        number = server_round + self.first_round - 1
        self._asked = [
            self._train_message(m.metadata.dst_node_id, number)
            for m in messages
            if m.metadata.dst_node_id in self.admission.members
        ]
        return self._asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the ciphertexts that came back.

        Raises
        ------
        RunFailedError
            As in the plain strategy.
        """
        number = server_round + self.first_round - 1
        self._updates = {}
        replies = self._catch_up(list(replies), number)
        aggregate, metrics = super().aggregate_train(server_round, replies)
        if aggregate is not None:
            self.ledger.append(aggregate)
        for node_id in self._updates:
            self._holds(node_id, number - 1)
        self._updates = {}
        self._threshold.forget()
        return aggregate, metrics

    def deliver(self, grid: Grid, config: ConfigRecord) -> None:
        """Send the last aggregate to every client, which judges the final model and keeps it.

        Raises
        ------
        RunFailedError
            If a client cannot take it, and failures are not tolerated.
        """
        number = self.ledger.last + 1
        config[SESSION_KEY] = self.ledger.session
        config[ROUND_KEY] = number
        self._prepare(grid, config)
        connected = set(grid.get_node_ids())
        nodes = [node for node in self.admission.members if node in connected]
        answers, failures = self._ask({n: self._content(n, number) for n in nodes}, FINAL_TYPE)
        behind = {n: m for n, m in answers.items() if is_hello(m)}
        if behind:
            failures += self._register_again(behind)
            again, lost = self._ask({n: self._content(n, number) for n in behind}, FINAL_TYPE)
            answers, failures = answers | again, failures + lost
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
            who = "; ".join(f"{f.client}: {f.reason}" for f in failures)
            raise RunFailedError(f"the final model was not taken by every client: {who}")

    def read(self, message: Message) -> Contribution:
        """Read one client's answer; its ciphertexts are checked one by one."""
        if is_hello(message):
            raise BractError("cannot follow, though it was sent the key and every aggregate again")
        contribution = super().read(message)
        if not contribution.ciphertexts:
            raise BractError("sent an update that is not encrypted; it was thrown away")
        return contribution

    def check(self, contribution: Contribution) -> None:
        """Refuse ciphertexts that would spoil the sum.

        Raises
        ------
        BractError
            If they are truncated, out of range, of another key, layout or model.
        """
        update = EncryptedUpdate.from_tensors(contribution.ciphertexts)
        initial = from_arrays(self.ledger.initial)
        check_ciphertexts(update, self.admission.public, self.encryption, initial)
        first = next(iter(self._updates.values()), update)
        if first.shapes != update.shapes:
            raise BractError("encrypted the model's tensors in another order than the others")
        self._updates[contribution.node_id] = update

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the shares that the integer weights stand for; they sum to 1."""
        shares = super().weigh(contributions)
        integers = self._integers(shares)
        return [weight / sum(integers) for weight in integers]

    def combine(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> ArrayRecord:
        """Return the encryption of ``sum_i weights[i] update_i``."""
        updates = [self._updates[c.node_id] for c in contributions]
        public = self.admission.public
        return combine_updates(public, updates, self._integers(weights)).to_record()

    def ask_validators(self, nodes: Sequence[int], models: Sequence[ArrayRecord]) -> list[Message]:
        """Return FedBoosting's messages, with what the clients need to decrypt the fused models."""
        messages = super().ask_validators(nodes, models)  # type: ignore[misc]
        if self.encryption.threshold is None:
            return list(messages)
        tag = fused_tag(self.outcome.server_round)
        return [
            Message(
                RecordDict({**m.content, **self._help(tag, models, m.metadata.dst_node_id)}),
                message_type=m.metadata.message_type,
                dst_node_id=m.metadata.dst_node_id,
            )
            for m in messages
        ]

    def _prepare(self, grid: Grid, config: ConfigRecord) -> None:
        self._net = grid
        config[VERSION_KEY] = bract.__version__
        self._instructions = ConfigRecord(dict(config))
        self._left_out = tuple(self.admission.admit(grid.get_node_ids(), self._instructions))
        self._names |= {n: hello.client for n, hello in self.admission.members.items()}
        for failure in self._left_out:
            _log.error("%s takes no part: %s", failure.client, failure.reason)
        if self._left_out and (not self.tolerate_failures or not self.admission.members):
            who = "; ".join(f"{f.client}: {f.reason}" for f in self._left_out)
            raise RunFailedError(f"keys: {who}")

    def _train_message(self, node_id: int, number: int) -> Message:
        return Message(
            self._content(node_id, number), message_type=MessageType.TRAIN, dst_node_id=node_id
        )

    def _content(self, node_id: int, number: int) -> RecordDict:
        """Return what a client needs to begin round ``number`` from where it stands."""
        content = RecordDict({CONFIG: self._instructions})
        held = self.admission.members[node_id].model_round
        if held < 0:
            content[ARRAYS] = self.ledger.initial
        if node_id in self.admission.boxes:
            content[KEY_BOX] = self.admission.boxes[node_id]
        for earlier in range(max(held, 0) + 1, number):
            aggregate = self.ledger.aggregate(earlier)
            content[aggregate_name(earlier)] = aggregate
            if self.encryption.threshold is not None:
                content.update(self._help(round_tag(earlier), [aggregate], node_id))
        return content

    def _help(self, tag: str, aggregates: Sequence[ArrayRecord], node_id: int) -> RecordDict:
        assert self._net is not None
        return self._threshold.content(
            tag,
            aggregates,
            node_id,
            instructions=self._instructions,
            connected=self._net.get_node_ids(),
        )

    def _catch_up(self, replies: list[Message], number: int) -> list[Message]:
        """Ask clients again that could not follow; return everybody's final answers."""
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self._asked}
        behind = {asked[m.metadata.reply_to_message_id]: m for m in replies if is_hello(m)}
        if not behind:
            return replies
        assert self._net is not None
        names = ", ".join(self._names[node] for node in behind)
        _log.warning("round %d: %s could not follow; sent again what it lacks", number, names)
        self._left_out += tuple(self._register_again(behind))
        again = [self._train_message(n, number) for n in behind if n in self.admission.members]
        self._asked = [m for m in self._asked if m.metadata.dst_node_id not in behind] + again
        answered = [m for m in replies if not is_hello(m)]
        return answered + list(self._net.send_and_receive(again, timeout=self.timeout))

    def _register_again(self, behind: Mapping[int, Message]) -> list[Failure]:
        assert self._net is not None
        hellos = [Hello.read(message, node) for node, message in behind.items()]
        for hello in hellos:
            del self.admission.members[hello.node_id]
            self._threshold.forget(hello.node_id)
        connected = self._net.get_node_ids()
        return self.admission.register(hellos, self._instructions, connected)

    def _read(
        self, replies: Iterable[Message]
    ) -> tuple[tuple[Contribution, ...], tuple[Failure, ...]]:
        contributions, failures = super()._read(replies)
        return contributions, failures + self._left_out

    def _ask(
        self, contents: Mapping[int, RecordDict], kind: str
    ) -> tuple[dict[int, Message], list[Failure]]:
        assert self._net is not None
        asked = [
            Message(content, message_type=kind, dst_node_id=node)
            for node, content in contents.items()
        ]
        answers, failures = self.pair(
            asked, self._net.send_and_receive(asked, timeout=self.timeout)
        )
        return dict(sorted(answers)), failures

    def _holds(self, node_id: int, model_round: int) -> None:
        hello = self.admission.members[node_id]
        self.admission.boxes.pop(node_id, None)
        self.admission.members[node_id] = Hello(
            node_id=node_id,
            client=hello.client,
            partition=hello.partition,
            key=hello.key,
            identity=hello.identity,
            model_round=model_round,
        )

    def _integers(self, shares: Sequence[float]) -> list[int]:
        with readable():
            return integer_weights(shares, self.encryption.max_weight_sum)


class EncryptedFedProx(EncryptedFedAvg, FedProx):
    """FedProx over ciphertexts; see `EncryptedFedAvg`."""


class EncryptedFedBoosting(EncryptedFedAvg, FedBoosting):
    """FedBoosting over ciphertexts; see `EncryptedFedAvg`.

    Fused models are integer linear combinations of ciphertexts (thesis, eq. 4.5), which the
    clients decrypt to score them. Every client can read every fused model, so what `fusing_weights`
    says about how little fusing hides from the other clients holds here too.
    """


def encrypted(kind: type[FedAvg]) -> type[EncryptedFedAvg]:
    """Return the strategy over ciphertexts that stands for a plain one."""
    kinds: dict[type[FedAvg], type[EncryptedFedAvg]] = {
        FedAvg: EncryptedFedAvg,
        FedProx: EncryptedFedProx,
        FedBoosting: EncryptedFedBoosting,
    }
    return kinds[kind]
