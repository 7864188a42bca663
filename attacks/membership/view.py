"""The view that an observer has of candidates: at one model alone, or in one round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.models.losses import label_rows, loss_of


@dataclass(frozen=True, kw_only=True)
class ModelView:
    """Measurements of N candidates at one model under attack, which is all that its readers hold.

    Whether a candidate is a member is no part of it.

    Attributes
    ----------
    kind
        Name of the declared loss.
    labels
        int64 ``(N,)``; float32 where the target is a number.
    local
        Outputs ``(N, classes)`` of the model under attack.
    references
        Outputs ``(M, N, classes)`` of models trained on public data alone; M may be 0.
    population, population_references
        Outputs for Z public records that no reference model was trained on: by the model under
        attack ``(Z, classes)``, and by the reference models ``(M, Z, classes)``.
    population_labels
        int64 ``(Z,)``.
    shadows
        Outputs ``(S, N, classes)`` of models trained alike on parts of the candidates; S may be 0.
    inside
        Which candidates each of them was trained on, bool ``(S, N)``.
    """

    kind: str
    labels: Tensor
    local: Tensor
    references: Tensor
    population: Tensor
    population_references: Tensor
    population_labels: Tensor
    shadows: Tensor = field(default_factory=lambda: torch.empty(0))
    inside: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    def beside(self, shadows: Tensor, inside: Tensor) -> Self:
        """Return the same view with shadow models."""
        return replace(self, shadows=shadows, inside=inside)

    @cached_property
    def loss(self) -> Tensor:
        """Loss of every candidate at the model under attack, ``(N,)``."""
        return losses(self.local, self.labels, self.kind)


@dataclass(frozen=True, kw_only=True)
class RoundView(ModelView):
    """Measurements of N candidates in one round, for one client under attack.

    ``local`` is the client's model after local training (``w_global - update``).

    Attributes
    ----------
    sent
        Outputs ``(N, classes)`` of the global model that the round began with.
    others
        Outputs ``(K, N, classes)`` of the other clients' models of the same round; K may be 0.
    alignment, others_alignment
        Cosine between the gradient of a candidate's loss at the global model and the client's
        update, ``(N,)``, and the other clients' updates, ``(K, N)``.
    coefficients
        Share of each candidate's gradient in the client's update beside all others, ``(N,)``
        (`bract.attacks.membership.measuring.coefficients`).
    """

    sent: Tensor
    others: Tensor
    alignment: Tensor
    others_alignment: Tensor
    coefficients: Tensor

    @cached_property
    def sent_loss(self) -> Tensor:
        """Loss at the global model, ``(N,)``."""
        return losses(self.sent, self.labels, self.kind)

    @cached_property
    def others_loss(self) -> Tensor:
        """Loss at the other clients' models, ``(K, N)``."""
        return losses(self.others, self.labels, self.kind)


def losses(outputs: Tensor, labels: Tensor, kind: str = "cross_entropy") -> Tensor:
    """Return the declared loss ``(..., N)`` of outputs ``(..., N, classes)``, in float64.

    ``exp(-loss)`` is what attackers take for the probability of a label: of a class exactly, of a
    text that of a mean token, of a number a normal density up to its scale.
    """
    values, loss = outputs.to(torch.float64), loss_of(kind)
    if not loss.of_classes:
        return loss.each(values, label_rows(labels, values.shape[-1], loss).to(values))
    logs = F.log_softmax(values, dim=-1)
    return -logs.gather(-1, labels.expand(values.shape[:-1])[..., None])[..., 0]


def scaled_confidence(outputs: Tensor, labels: Tensor, kind: str = "cross_entropy") -> Tensor:
    """Return ``log p - log(1 - p)`` for the probability p of each label, ``(..., N)``.

    LiRA's score (Carlini et al. 2022, section VI-A): near normal over models. Of classes it is
    computed from logits, so that p near 1 loses no digits.
    """
    if not loss_of(kind).of_classes:
        found = losses(outputs, labels, kind).clamp_min(1e-12)
        return -found - (-torch.expm1(-found)).log()
    values = outputs.to(torch.float64)
    own = labels.expand(values.shape[:-1])[..., None]
    rest = values.scatter(-1, own, -torch.inf).logsumexp(-1)
    return values.gather(-1, own)[..., 0] - rest
