"""FedBoosting (Ren et al. 2022; thesis, chapter 4): weights from cross-validation among clients."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from bract.errors import BractError, RunFailedError
from bract.process.timeline import span
from bract.protocol.arrays import from_arrays, to_packed
from bract.protocol.fused import FUSED_TYPE, TRAINING_SCORE_KEY, read_scores, write_fused
from bract.protocol.records import Contribution, Failure, who_failed
from bract.seeds import derive_seed
from bract.strategies.aggregation import fusing_weights
from bract.strategies.fedavg import FedAvg
from bract.strategies.scores import (
    Boosting,
    ScoreArray,
    boosting_weights,
    usable_column,
    usable_training_score,
)

_log = logging.getLogger(__name__)


class FedBoosting(FedAvg):
    """Weigh each client by its model's scores on all clients' validation data.

    Each round: the clients train; the server fuses their updates to N models; every client that
    trained scores all N on its own validation split, in one extra message; the weights p follow
    from those scores V and the training scores T, and w <- w - eta sum_i p_i g_i. Validation data
    never leaves a client. One client alone has weight 1 and is not asked to validate.

    Use it in any ServerApp like Flower's own strategies; `bract.protocol.fused` states what a
    ClientApp has to answer. T is read from the train reply's metric ``trained_accuracy`` (score of
    the trained model on the training data), or else from ``train_accuracy``; with ``signal="loss"``
    from ``trained_loss`` or else ``train_loss``.

    Failures and their effects:

    - a client fails in training: as in `FedAvg`; with ``tolerate_failures`` it has no model, no
      column and no weight this round;
    - a validator fails, is too late, sends another number of scores than there are models, only
      values that are no numbers, or values out of range: its column of V is left out and an error
      names it; its own update still counts;
    - no usable column is left: the run fails; with ``tolerate_failures`` the weights of that
      round are uniform, with a warning;
    - a single score, or a training score, is no number: it counts as the worst possible;
    - no client sends a training score: weights follow V alone, with a warning;
    - equal scores give equal weights.

    A dishonest validator can lift its own model by one column of V at most, and T is its own
    unverified claim: the weights bound a poisoned client, not a dishonest one.

    Parameters
    ----------
    weighting
        ``softmax``: p = softmax(softmax(T) ⊙ sum_j V[:, j]) (eq. 4.2). ``proportional``: p_i ∝
        mean_j V[i, j] · T_i, as the authors' code has it, which separates clients more sharply.
    signal
        ``accuracy`` or ``loss``: what V and T are made of; see `boosting_weights`.
    training_scores
        False: weights follow the validation scores V alone (thesis, figure 4.6), and the clients
        are asked for no training score.
    fusing
        ``fixed`` (eq. 4.5) or ``random`` weights with the client's own dominant; see
        `fusing_weights`, also for how little fusing hides.
    p_hat
        The client's own share in its fused model, above 0.5; 0.9 in the paper. 1 fuses nothing.
    seed
        Decides the random fusing weights.
    validation_timeout
        Seconds to wait for the validators.
    server_lr, fraction, min_nodes, tolerate_failures, first_round
        As in `FedAvg`. Fused models are ``w - server_lr * Ĝ_i``: what the next global model would
        be if the client's own update decided alone.
    """

    def __init__(
        self,
        *,
        weighting: Literal["softmax", "proportional"] = "softmax",
        signal: Literal["accuracy", "loss"] = "accuracy",
        training_scores: bool = True,
        fusing: Literal["fixed", "random"] = "fixed",
        p_hat: float = 0.9,
        seed: int = 0,
        validation_timeout: float = 3600.0,
        server_lr: float = 1.0,
        fraction: float = 1.0,
        min_nodes: int = 2,
        tolerate_failures: bool = False,
        first_round: int = 1,
    ) -> None:
        super().__init__(
            server_lr=server_lr,
            fraction=fraction,
            min_nodes=min_nodes,
            tolerate_failures=tolerate_failures,
            first_round=first_round,
        )
        for name, value, expected in (
            ("weighting", weighting, ("softmax", "proportional")),
            ("signal", signal, ("accuracy", "loss")),
            ("fusing", fusing, ("fixed", "random")),
        ):
            if value not in expected:
                raise BractError(
                    f"{name}: found {value!r}; expected {' or '.join(expected)}",
                    code="config-value",
                )
        fusing_weights(2, p_hat)
        self.weighting = weighting
        self.signal = signal
        self.training_scores = training_scores
        self.fusing = fusing
        self.p_hat = p_hat
        self.seed = seed
        self.validation_timeout = validation_timeout
        self._grid: Grid | None = None
        self._config = ConfigRecord()
        self._boosting: Boosting | None = None
        self._lost_validators: tuple[Failure, ...] = ()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a sample of the nodes to train on ``arrays`` and, where T counts, to report it."""
        config[TRAINING_SCORE_KEY] = self.training_scores
        messages = super().configure_train(server_round, arrays, config, grid)
        self._grid, self._config = grid, ConfigRecord(dict(config))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have the fused models validated, then combine the updates.

        Raises
        ------
        RunFailedError
            As `FedAvg.aggregate_train`, and if no validator's scores can be used and failures are
            not tolerated.
        """
        self._boosting, self._lost_validators = None, ()
        result = super().aggregate_train(server_round, replies)
        self.outcome = replace(
            self.outcome,
            boosting=self._boosting,
            failures=self.outcome.failures + self._lost_validators,
        )
        return result

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the public weights p_i; costs one message phase where N > 1."""
        number, names = self.outcome.server_round, tuple(c.client for c in contributions)
        count = len(contributions)
        training = np.full(count, math.nan)
        if self.training_scores:
            training = np.array([self._training_score(c) for c in contributions])
        validation = np.full((count, count), math.nan)
        if count == 1:
            _log.info("round %d: %s is alone; its weight is 1", number, names[0])
            weights = [1.0]
        else:
            validation = self._validate(contributions)
            answered = ~np.isnan(validation).all(axis=0)
            if answered.any():
                weights = boosting_weights(
                    training if self.training_scores else None,
                    validation[:, answered],
                    weighting=self.weighting,
                    signal=self.signal,
                )
            else:
                weights = self._without_scores(number, count)
        self._boosting = Boosting(names, training, validation, tuple(weights), self.signal)
        shares = ", ".join(f"{c} {w:.3f}" for c, w in zip(names, weights, strict=True))
        _log.info("round %d: boosting weights: %s", number, shares)
        return weights

    def _validate(self, contributions: tuple[Contribution, ...]) -> ScoreArray:
        """Send the fused models to the trained clients; return V with NaN columns for the lost."""
        assert self._grid is not None
        number, count = self.outcome.server_round, len(contributions)
        rows = fusing_weights(
            count,
            self.p_hat,
            fusing=self.fusing,
            seed=derive_seed(self.seed, "fusing", number),
        )
        with span("fuse models"):
            models = [self.combine(contributions, row) for row in rows]
            asked = self.ask_validators([c.node_id for c in contributions], models)
        replies = self._grid.send_and_receive(asked, timeout=self.validation_timeout)
        validation = np.full((count, count), math.nan)
        column = {c.node_id: j for j, c in enumerate(contributions)}
        answers, failures = self.pair(asked, replies)
        for node_id, message in answers:
            try:
                scores = read_scores(message, self.signal)
                problem = usable_column(scores, count=count, signal=self.signal)
                if problem is not None:
                    raise BractError(problem, code="update-refused")
            except BractError as error:
                failures.append(self.failure(node_id, str(error)))
                continue
            validation[:, column[node_id]] = scores
        failures.sort(key=lambda f: (f.client, f.node_id))
        for failure in failures:
            _log.error(
                "round %d: %s left out as a validator: %s", number, failure.client, failure.reason
            )
        self._lost_validators = tuple(
            replace(f, reason=f"validation: {f.reason}") for f in failures
        )
        return validation

    def ask_validators(self, nodes: Sequence[int], models: Sequence[ArrayRecord]) -> list[Message]:
        """Return the messages with which the fused models go to the validators."""
        content = write_fused(models, self._config)
        packed = content
        if any(node in self.reads_packed for node in nodes):
            packed = write_fused([to_packed(from_arrays(m)) for m in models], self._config)
        return [
            Message(
                packed if node in self.reads_packed else content,
                message_type=FUSED_TYPE,
                dst_node_id=node,
            )
            for node in nodes
        ]

    def counts(self, kind: str, message: Message) -> bool:
        """Return whether a reply has the form of an update, or of a validator's scores."""
        if kind == FUSED_TYPE:
            return any(self.signal in r for r in message.content.metric_records.values())
        return super().counts(kind, message)

    def _without_scores(self, number: int, count: int) -> list[float]:
        who = who_failed(self._lost_validators)
        if not self.tolerate_failures:
            raise RunFailedError(
                f"round {number}: no client could validate the fused models ({who}); a ClientApp "
                f"needs a handler @app.evaluate('fused'), see bract.protocol.fused"
            )
        _log.warning("round %d: no usable validation; weights are uniform (1/%d)", number, count)
        return [1.0 / count] * count

    def _training_score(self, contribution: Contribution) -> float:
        metrics = contribution.metrics
        name = f"trained_{self.signal}"
        score = metrics.get(name, metrics.get(f"train_{self.signal}", math.nan))
        if usable_training_score(score, self.signal):
            return score
        _log.warning(
            "%s sent no usable training score (%s: %s); it counts as the worst",
            contribution.client,
            name,
            metrics.get(name, "missing"),
        )
        return math.nan
