"""Masked sums: FedAvg and FedProx whose server learns the weighted sum of updates, and no update.

The server sends the global model in the clear, as in a plain run, so a client that missed rounds
lacks nothing. Around each training phase stand three before it, in which keys, shares and their
receipt are exchanged, and two after it (one without ``consistency``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from bract.captures.aggregates import Aggregates
from bract.config import FederationConfig
from bract.config.agreed import AgreedRun
from bract.config.client_names import AGGREGATE
from bract.errors import BractError, RunFailedError
from bract.installed.versions import release
from bract.masks.errors import LostSumError
from bract.paillier.weights import integer_weights
from bract.protocol.arrays import to_arrays
from bract.protocol.ciphertexts import apply_mean
from bract.protocol.keyexchange import SESSION_KEY
from bract.protocol.masking import LOST_KEY, MaskedUpdate, check_masked, decode_mean
from bract.protocol.records import (
    CONFIG,
    VERSION_KEY,
    Contribution,
    Failure,
    is_encrypted_reply,
    who_failed,
)
from bract.strategies.encrypted.forms import of_one_form
from bract.strategies.encrypted.transport import Transport
from bract.strategies.fedavg import FedAvg
from bract.strategies.fedprox import FedProx
from bract.strategies.masked.round import MaskedRound
from bract.updates.shares import (
    SMALLEST_SUM,
    counted,
    example_shares,
    largest_share,
    limited,
)

_log = logging.getLogger(__name__)


class MaskedFedAvg(FedAvg):
    """FedAvg over masked updates: `bract.masks` says what the server learns.

    Weights are the integers closest to the strategy's shares, by the examples that each client
    announces with its keys; none exceeds ``max_share`` of the sum, and the largest is cut so far
    that clients help to unmask the sum (`bract.updates.shares.limited`). A client that drops out
    after that leaves the sum; the others' weights divide by what is left.

    Parameters
    ----------
    config
        The federation, whose identity every client computes too, and how its updates are masked.
    aggregates
        Where to keep each round's mean update, for an audit; None keeps none.
    timeout
        Seconds to wait for answers in the phases besides training.
    options
        As the plain strategy takes them.
    """

    def __init__(
        self,
        *,
        config: FederationConfig,
        aggregates: Aggregates | None = None,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.config = config
        self.encryption = config.encryption
        self.aggregates = aggregates
        self._session = uuid.uuid4().hex
        self._transport = Transport(self.pair, timeout, lambda: self.closing.still_busy())
        self._round: MaskedRound | None = None
        self._updates: dict[int, MaskedUpdate] = {}
        self._late: list[Failure] = []
        self._banned: dict[int, str] = {}
        self._spoilt: list[frozenset[int]] = []
        self._lost_sums: list[str] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Gather keys and shares of a sample of the nodes, and ask them to train on ``arrays``.

        Raises
        ------
        RunFailedError
            If too few clients are left for a sum, or one fails and failures are not tolerated.
        """
        self._transport.grid = grid
        config[SESSION_KEY] = self._session
        config[VERSION_KEY] = release()
        if self._lost_sums:
            # Clients then know that the same model may be summed again without the one at fault.
            config[LOST_KEY] = self._lost_sums
        messages = list(super().configure_train(server_round, arrays, config, grid))
        instructions = messages[0].content.config_records[CONFIG] if messages else config
        self._round = MaskedRound(
            self.encryption,
            self._transport,
            AgreedRun.of(self.config, grid.run.run_id, self._session).identity,
            ConfigRecord(dict(instructions)),
            self.names,
            self._integer_weights,
        )
        self._updates, self._late = {}, []
        asked = [m.metadata.dst_node_id for m in messages]
        self._round.gather([node for node in asked if node not in self._banned])
        self._round.failures += [
            self.failure(node, f"was left out: {why}")
            for node, why in self._banned.items()
            if node in asked
        ]
        self._refuse_failures(self._round.failures)
        ready = set(self._round.ready)
        self._asked = [m for m in messages if m.metadata.dst_node_id in ready]
        return self._asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Unmask the sum of the answers.

        Raises
        ------
        RunFailedError
            As in the plain strategy, and where the sum is lost.
        """
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.outcome = replace(self.outcome, failures=(*self.outcome.failures, *self._late))
        return arrays, metrics

    def is_update(self, message: Message) -> bool:
        """Return whether a reply has the form of a masked update."""
        return is_encrypted_reply(message)

    def read(self, message: Message) -> Contribution:
        """Read one client's answer, which must be masked."""
        contribution = super().read(message)
        if not contribution.ciphertexts:
            raise BractError(
                "sent an update that is not masked; it was thrown away", code="update-refused"
            )
        return contribution

    def check(self, contribution: Contribution) -> None:
        """Refuse a masked update that would spoil the sum.

        Raises
        ------
        BractError
            If it is of another round, roster, layout or model.
        """
        assert self._round is not None
        update = MaskedUpdate.from_tensors(contribution.ciphertexts)
        check_masked(update, self._round.roster, self.encryption, self._sent)
        self._updates[contribution.node_id] = update

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the shares of the integer weights with which the answers were masked."""
        assert self._round is not None
        seats = self._round.roster.by_node
        weights = [seats[c.node_id].weight for c in contributions]
        return [weight / sum(weights) for weight in weights]

    def combine(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> ArrayRecord:
        """Return the model ``w - server_lr * mean``, the mean from the unmasked sum.

        A sum that cannot be unmasked because one client shared wrong seeds leaves the model as it
        is and that client out of later rounds, where failures are tolerated. So does, without
        leaving any client out, a sum that dropouts leave mostly to one client.

        Raises
        ------
        RunFailedError
            If too few clients help to unmask, or failures are not tolerated.
        """
        del weights
        assert self._round is not None
        updates = {c.node_id: self._updates[c.node_id] for c in contributions}
        seats = self._round.roster.by_node
        left = sorted((seats[node].weight for node in updates), reverse=True)
        if (found := counted(left)) < SMALLEST_SUM:
            # No client would help: their own bounds are not lower.
            listed = ", ".join(map(str, left))
            why = f"the weights that are left ({listed}) count as {float(found):.3g} clients"
            return self._lost(LostSumError(why), goes_on=True)
        try:
            sums, self._late = self._round.unmask(updates)
        except LostSumError as error:
            return self._lost(error)
        shapes = next(iter(updates.values())).shapes
        try:
            mean = decode_mean(sums, shapes, self.encryption, sum(left))
        except BractError as error:
            return self._lost(LostSumError(f"{error}; {self._suspects(updates)}"), goes_on=True)
        if self.aggregates is not None:
            plain = {name: value for tensors in mean.values() for name, value in tensors.items()}
            self.aggregates.put(self._round.number, plain)
        return to_arrays(apply_mean(self._sent, mean, self.server_lr))

    def _read(
        self, replies: Iterable[Message]
    ) -> tuple[tuple[Contribution, ...], tuple[Failure, ...]]:
        contributions, failures = super()._read(replies)
        updates = [self._updates[c.node_id] for c in contributions]
        forms = [(update.shapes, update.task) for update in updates]
        contributions, others = of_one_form(contributions, forms)
        failures += tuple(
            self.failure(
                c.node_id,
                "masked the tensors in another order than the others, or for another message",
            )
            for c in others
        )
        assert self._round is not None
        return contributions, failures + tuple(self._round.failures)

    def _lost(self, error: LostSumError, *, goes_on: bool = False) -> ArrayRecord:
        """Return the model as it was.

        Parameters
        ----------
        goes_on
            Whether the run does, though no client can be named as the cause: the sum was unmasked
            to values that no update gives, or one client weighs too much in what is left.
        """
        assert self._round is not None
        number, node = self._round.number, error.node
        who = "" if node is None else f"{self.names.of(node)} "
        if not self.tolerate_failures or (node is None and not goes_on):
            raise RunFailedError(
                f"round {number}: the masked sum is lost: {who}{error}; the model of the round "
                "before is kept, go on with --resume"
            )
        self._lost_sums.append(self._round.roster.digest.hex())
        after = ""
        if node is not None:
            self._banned[node] = str(error)
            after = "; it takes part in no later round"
        name = AGGREGATE if node is None else self.names.of(node)
        self._late.append(Failure(node or 0, name, f"{error}; the model stays as it was"))
        _log.error(
            "round %d: the masked sum is lost, the model stays as it is: %s%s%s",
            number,
            who,
            error,
            after,
        )
        return to_arrays(self._sent)

    def _suspects(self, nodes: Iterable[int]) -> str:
        """Say of which clients one spoilt the sum: one at least of those in every spoilt sum.

        That holds for one culprit. No mask can be taken off a single update, so the sum alone does
        not tell them apart.
        """
        self._spoilt.append(frozenset(nodes))
        names = ", ".join(sorted(self.names.of(n) for n in self._spoilt[-1]))
        text = f"the sum does not show which of its clients: {names}"
        common = frozenset.intersection(*self._spoilt)
        if len(self._spoilt) > 1 and common:
            names = ", ".join(sorted(self.names.of(n) for n in common))
            text += f"; in all {len(self._spoilt)} such sums of this run: {names}"
        return text

    def _integer_weights(self, examples: Sequence[int]) -> list[int]:
        if self.weighting == "uniform":
            return [1] * len(examples)
        shares = limited(example_shares(examples, self.max_share))
        return integer_weights(
            shares,
            self.encryption.max_weight_sum,
            most=largest_share(len(examples), self.max_share),
            # Of one or two, which are too few for a sum, the round says so.
            allowed=lambda weights: len(weights) < 3 or counted(weights) >= SMALLEST_SUM,
        )

    def _refuse_failures(self, failures: Sequence[Failure]) -> None:
        if failures and not self.tolerate_failures:
            who = who_failed(failures)
            raise RunFailedError(f"masks: {who}")


class MaskedFedProx(MaskedFedAvg, FedProx):
    """FedProx over masked updates; see `MaskedFedAvg`."""


def masked(kind: type[FedAvg]) -> type[MaskedFedAvg]:
    """Return the strategy over masked updates that represents a plain one.

    Raises
    ------
    BractError
        If it needs single updates.
    """
    kinds: dict[type[FedAvg], type[MaskedFedAvg]] = {FedAvg: MaskedFedAvg, FedProx: MaskedFedProx}
    if kind not in kinds:
        raise BractError(
            f"strategy {kind.__name__}: needs single clients' updates, which masks hide; take "
            "encryption: paillier",
            code="config-conflict",
        )
    return kinds[kind]
