"""Membership attackers: each gives every candidate of a round a score, higher for members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.special import ndtr

from bract.attacks.membership.view import ModelView, RoundView, losses, scaled_confidence
from bract.registry import Registry

FEWEST_SHADOWS = 4
"""Shadow models without which no attacker that needs them runs."""

LEAST_SPREAD = 1e-6
"""Standard deviation below which a null distribution is widened, so that nothing divides by 0."""


class MembershipAttacker(ABC):
    """Scores candidates from one round's measurements.

    Attributes
    ----------
    name, title
        The registered name, and what the page calls it.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def lacks(self, view: RoundView) -> str | None:
        """Return what the attacker needs and the view does not hold; None if nothing is missing."""

    @abstractmethod
    def score(self, view: RoundView) -> Tensor:
        """Return float64 ``(N,)``, higher for candidates that look trained on."""

    def over_rounds(self, scores: Sequence[Tensor]) -> Tensor:
        """Return one score a candidate, from those of R >= 1 rounds: their mean."""
        return torch.stack(list(scores)).mean(0)


MEMBERSHIP: Registry[type[MembershipAttacker]] = Registry("membership attacker")


class ModelAttacker(MembershipAttacker):
    """Scores candidates from one model alone, as anyone who receives it can; so of a round too."""

    @abstractmethod
    def lacks(self, view: ModelView) -> str | None:
        """Return what the attacker needs and the view does not hold; None if nothing is missing."""

    @abstractmethod
    def score(self, view: ModelView) -> Tensor:
        """Return float64 ``(N,)``, higher for candidates that look trained on."""


class _Always(MembershipAttacker):
    def lacks(self, view: RoundView) -> str | None:
        """Return None: the client's own upload is enough."""
        del view
        return None


class _FromOthers(MembershipAttacker):
    def lacks(self, view: RoundView) -> str | None:
        """Name the other clients' uploads where there are none."""
        return None if len(view.others) else "uploads of other clients in the same round"


class _FromReferences(ModelAttacker):
    def lacks(self, view: ModelView) -> str | None:
        """Name the reference models where there are none."""
        return None if len(view.references) else "public data, to train reference models on"


class ShadowAttacker(ModelAttacker):
    """Compares with shadow models, each trained as the model was on a part of the candidates."""

    def lacks(self, view: ModelView) -> str | None:
        """Name the shadow models where there are too few."""
        found = "shadow models, trained on parts of the candidates"
        return None if len(view.shadows) >= FEWEST_SHADOWS else found


@MEMBERSHIP.register("loss")
class Loss(ModelAttacker):
    """Low loss at the model (Yeom et al. 2018)."""

    name = "loss"
    title = "Loss at the model"

    def lacks(self, view: ModelView) -> str | None:
        """Return None: the model is enough."""
        del view
        return None

    def score(self, view: ModelView) -> Tensor:
        """Return minus the loss."""
        return -view.loss


@MEMBERSHIP.register("loss-drop")
class LossDrop(_Always):
    """By how much local training lowered the loss: the global model calibrates it."""

    name = "loss-drop"
    title = "Drop of the loss by local training"

    def score(self, view: RoundView) -> Tensor:
        """Return the loss at the global model less that at the client's."""
        return view.sent_loss - view.loss


@MEMBERSHIP.register("alignment")
class Alignment(_Always):
    """Cosine of a candidate's gradient and the update (Li et al. 2022, "Effective passive
    membership inference attacks in federated learning")."""

    name = "alignment"
    title = "Gradient alignment"

    def score(self, view: RoundView) -> Tensor:
        """Return the cosine, in [-1, 1]."""
        return view.alignment.to(torch.float64)


@MEMBERSHIP.register("gradient-regression")
class GradientRegression(_Always):
    """Regression of the update on the gradients of all candidates together.

    The alignment of a candidate also has what its gradient shares with those of members. The
    regression's coefficients have not; an adversary who has candidates has all of them.
    """

    name = "gradient-regression"
    title = "Gradient regression"

    def score(self, view: RoundView) -> Tensor:
        """Return the coefficient."""
        return view.coefficients.to(torch.float64)


@MEMBERSHIP.register("global-loss")
class GlobalLoss(_Always):
    """Low loss at the global model, which every client receives: no upload is needed."""

    name = "global-loss"
    title = "Loss at the global model (a curious client)"

    def score(self, view: RoundView) -> Tensor:
        """Return minus the loss at the model that the round began with."""
        return -view.sent_loss


@MEMBERSHIP.register("fedmia-loss")
class FedMIALoss(_FromOthers):
    """FedMIA (Zhu et al., arXiv 2402.06289, section 4): other clients' models as the null.

    The measurement of a non-member is taken for normal, with mean and variance of those at the
    other clients' models, and the score is the one-tailed probability that the null stays below
    the client's own measurement. Scores are averaged over rounds.
    """

    name = "fedmia-loss"
    title = "FedMIA, loss"

    def score(self, view: RoundView) -> Tensor:
        """Return the null's distribution function at minus the client's loss, in [0, 1]."""
        return below(-view.loss, -view.others_loss)


@MEMBERSHIP.register("fedmia-alignment")
class FedMIAAlignment(_FromOthers):
    """FedMIA with the gradient's cosine as the measurement."""

    name = "fedmia-alignment"
    title = "FedMIA, gradient"

    def score(self, view: RoundView) -> Tensor:
        """Return the null's distribution function at the client's cosine, in [0, 1]."""
        return below(view.alignment.to(torch.float64), view.others_alignment.to(torch.float64))


@MEMBERSHIP.register("lira")
class OfflineLiRA(_FromReferences):
    """Offline LiRA (Carlini et al. 2022, equation 4) with models trained on public data.

    The scaled confidence of a non-member is taken for normal, with the mean over the reference
    models and, as they are few, one variance for all candidates.
    """

    name = "lira"
    title = "LiRA, offline"

    def score(self, view: ModelView) -> Tensor:
        """Return the standard score; monotone in the one-tailed probability, without its ties."""
        own = scaled_confidence(view.local, view.labels, view.kind)
        null = scaled_confidence(view.references, view.labels, view.kind)
        return (own - null.mean(0)) / spread_of(null).mean().clamp_min(LEAST_SPREAD)


@MEMBERSHIP.register("rmia")
class OfflineRMIA(_FromReferences):
    """Offline RMIA (Zarifzadeh, Liu and Shokri, ICML 2024, equations 2 and 10).

    ``LR(x, z) = (p(x | w) / p(x)) / (p(z | w) / p(z))`` for public records z; the score is the
    share of z with ``LR(x, z) > gamma``. ``p(x)`` is half of ``(1 + a) p_out(x) + 1 - a`` with
    p_out the mean over reference models; ``a`` and ``gamma`` are the paper's (0.3 and 1).
    """

    name = "rmia"
    title = "RMIA, offline"
    gamma: ClassVar[float] = 1.0
    a: ClassVar[float] = 0.3

    def score(self, view: ModelView) -> Tensor:
        """Return the share of public records that a candidate dominates, in [0, 1]."""
        own = self._ratio(view.local, view.references, view.labels, view.kind)
        public = (view.population, view.population_references, view.population_labels)
        null = self._ratio(*public, view.kind).sort().values
        # LR(x, z) > gamma where the ratio of z is below that of x over gamma.
        return torch.searchsorted(null, own / self.gamma).to(torch.float64) / len(null)

    def _ratio(self, target: Tensor, references: Tensor, labels: Tensor, kind: str) -> Tensor:
        own = (-losses(target, labels, kind)).exp()
        out = (-losses(references, labels, kind)).exp().mean(0)
        return own / (0.5 * ((1.0 + self.a) * out + 1.0 - self.a))


def below(own: Tensor, null: Tensor) -> Tensor:
    """Return the normal distribution function at ``own`` ``(N,)`` of nulls ``(K, N)``, K >= 1."""
    found: Tensor = ndtr((own - null.mean(0)) / spread_of(null))
    return found


def spread_of(null: Tensor) -> Tensor:
    """Return the standard deviation of each candidate's null ``(K, N)``, as ``(N,)``.

    From fewer than four measurements a candidate's own deviation says little: all candidates then
    share the root mean square of theirs. From one, it is the spread of the measurements
    themselves.
    """
    count = len(null)
    if count == 1:
        return null[0].std().clamp_min(LEAST_SPREAD).expand(null.shape[1:])
    own = null.std(0)
    if count < 4:
        own = own.square().mean().sqrt().expand(own.shape)
    return own.clamp_min(LEAST_SPREAD)
