"""FedBoosting's weights: from training scores T and cross-validation scores V to p.

The functions here know nothing of Flower or of tensors, only numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bract.schema.metrics import BoostingRow

_log = logging.getLogger(__name__)

ScoreArray = npt.NDArray[np.float64]
_SMALLEST_LOSS = 1e-12


@dataclass(frozen=True)
class Boosting:
    """The scores of one round of FedBoosting, and the weights that followed.

    Attributes
    ----------
    clients
        Names, in the order of every other field.
    training
        T, float64 ``(N,)``: each client's score on its own training data; NaN where it sent none
        or was asked for none.
    validation
        V, float64 ``(N, N)``: score of model i on client j's validation split; a column of NaN
        where client j did not answer usably.
    weights
        p, ``(N,)``, summing to 1.
    signal
        ``accuracy`` or ``loss``: what T and V are.
    """

    clients: tuple[str, ...]
    training: ScoreArray
    validation: ScoreArray
    weights: tuple[float, ...]
    signal: str = "accuracy"

    def to_record(self) -> BoostingRow:
        """Return the record for ``metrics.jsonl``, where what is not finite is None."""
        return BoostingRow(
            clients=list(self.clients),
            V=self.validation.tolist(),
            T=self.training.tolist(),
            weights=list(self.weights),
            signal="loss" if self.signal == "loss" else "accuracy",
        )


def boosting_weights(
    training: ScoreArray | None,
    validation: ScoreArray,
    *,
    weighting: str = "softmax",
    signal: str = "accuracy",
) -> list[float]:
    """Return p, the clients' weights, summing to 1.

    Parameters
    ----------
    training
        T ``(N,)``. A value that is no score counts as the worst one; where no client sent any, T
        is left out, which is logged. None leaves it out: weights follow the validation scores
        alone, every client's T being the same (``softmax``: p = softmax(sum_j V[:, j] / N)). The
        thesis compares with that in figure 4.6 and prints no equation for it.
    validation
        V ``(N, M)`` of M >= 1 validators whose answer `usable_column` accepted; an entry that is
        no number counts as the worst score.
    weighting
        ``softmax``: p = softmax(softmax(T) ⊙ sum_j V[:, j]) (thesis, eq. 4.2).
        ``proportional``: p_i ∝ mean_j V[i, j] · T_i / sum T, which the authors' code computes.
    signal
        ``accuracy``: T and V are accuracies in [0, 1]. ``loss``: they are losses >= 0, turned
        round so that better stays more: ``softmax`` takes exp(-loss), for cross entropy the
        geometric mean of the true labels' probabilities; ``proportional`` takes 1/mean_j V[i, j]
        and 1/T_i, as the authors' code does. (Equation 4.2 taken literally on losses would give
        the worst client the largest weight.)
    """
    n, V = len(validation), _worst_for_missing(validation, signal)
    T = np.ones(n)
    if training is not None and np.isfinite(training).any():
        T = _worst_for_missing(training, signal)
    elif training is not None:
        _log.warning("no client sent a training score; weights follow the validation alone")
    if weighting == "softmax":
        if signal == "loss":
            T, V = np.exp(-T), np.exp(-V)
        weights = _softmax(_softmax(T) * V.sum(axis=1))
    else:
        means = V.mean(axis=1)
        if signal == "loss":
            T, means = (1.0 / np.maximum(x, _SMALLEST_LOSS) for x in (T, means))
        raw = means * T
        total = raw.sum()
        if total <= 0.0:
            _log.warning("every product of scores is zero; weights are uniform (1/%d each)", n)
            return [1.0 / n] * n
        weights = raw / total
    if n > 1 and np.ptp(weights) == 0.0:
        _log.info("all %d clients scored alike; their weights are equal", n)
    return [float(w) for w in weights]


def usable_column(scores: Sequence[float], *, count: int, signal: str) -> str | None:
    """Return why one validator's scores cannot be used; None if they can.

    A validator is left out that sends another number of scores than there are models, only
    values that are no numbers (its validation split may be empty), an accuracy outside [0, 1], or
    a loss below 0.
    """
    if len(scores) != count:
        return f"sent {len(scores)} scores for {count} models"
    usable = [s for s in scores if not math.isnan(s)]
    if not usable or not any(math.isfinite(s) for s in usable):
        return "sent no finite score: an empty validation split, or every model diverged"
    if signal == "accuracy" and not all(0.0 <= s <= 1.0 for s in usable if math.isfinite(s)):
        return f"sent an accuracy outside [0, 1]: {_first(usable, lambda s: not 0 <= s <= 1)}"
    if signal == "loss" and any(s < 0.0 for s in usable):
        return f"sent a loss below 0: {_first(usable, lambda s: s < 0)}"
    return None


def usable_training_score(score: float, signal: str) -> bool:
    """Return whether T_i is an accuracy in [0, 1], or a finite loss >= 0."""
    return math.isfinite(score) and score >= 0.0 and (signal == "loss" or score <= 1.0)


def _first(scores: Sequence[float], wanted: Any) -> float:
    return next(s for s in scores if wanted(s))


def _worst_for_missing(scores: ScoreArray, signal: str) -> ScoreArray:
    worst = 0.0 if signal == "accuracy" else math.inf
    filled: ScoreArray = np.where(np.isfinite(scores), scores, worst)
    return filled


def _softmax(values: ScoreArray) -> ScoreArray:
    powers: ScoreArray = np.exp(values - values.max())
    shares: ScoreArray = powers / powers.sum()
    return shares
