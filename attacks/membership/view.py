"""What a server sees of candidates in one round: outputs of models, and alignment with uploads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RoundView:
    """Measurements of N candidates in one round, for one client under attack.

    Whether a candidate is a member is no part of it.

    Attributes
    ----------
    labels
        int64 ``(N,)``.
    sent, local
        Logits ``(N, classes)`` of the global model that the round began with, and of the client's
        model after local training (``w_global - update``).
    others
        Logits ``(K, N, classes)`` of the other clients' models of the same round; K may be 0.
    alignment, others_alignment
        Cosine between the gradient of a candidate's loss at the global model and the client's
        update, ``(N,)``, and the other clients' updates, ``(K, N)``.
    coefficients
        Share of each candidate's gradient in the client's update beside all others, ``(N,)``
        (`bract.attacks.membership.measuring.coefficients`).
    references
        Logits ``(M, N, classes)`` of models trained on public data alone; M may be 0.
    population, population_references
        Logits of Z public records that no reference model was trained on: by the client's model
        ``(Z, classes)``, and by the reference models ``(M, Z, classes)``.
    population_labels
        int64 ``(Z,)``.
    """

    labels: Tensor
    sent: Tensor
    local: Tensor
    others: Tensor
    alignment: Tensor
    others_alignment: Tensor
    coefficients: Tensor
    references: Tensor
    population: Tensor
    population_references: Tensor
    population_labels: Tensor

    @cached_property
    def loss(self) -> Tensor:
        """Cross entropy of every candidate at the client's model, ``(N,)``."""
        return cross_entropy(self.local, self.labels)

    @cached_property
    def sent_loss(self) -> Tensor:
        """Cross entropy at the global model, ``(N,)``."""
        return cross_entropy(self.sent, self.labels)

    @cached_property
    def others_loss(self) -> Tensor:
        """Cross entropy at the other clients' models, ``(K, N)``."""
        return cross_entropy(self.others, self.labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses ``(..., N)`` in nats of logits ``(..., N, classes)``, in float64."""
    logs = F.log_softmax(logits.to(torch.float64), dim=-1)
    return -logs.gather(-1, labels.expand(logits.shape[:-1])[..., None])[..., 0]


def scaled_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``log p - log(1 - p)`` for the probability p of each label, ``(..., N)``.

    LiRA's score (Carlini et al. 2022, section VI-A): near normal over models. Computed from logits,
    so that p near 1 loses no digits.
    """
    values = logits.to(torch.float64)
    own = labels.expand(values.shape[:-1])[..., None]
    rest = values.scatter(-1, own, -torch.inf).logsumexp(-1)
    return values.gather(-1, own)[..., 0] - rest
