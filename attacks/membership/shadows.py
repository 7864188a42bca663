"""Attackers that hold a model against shadow models, of which they know what each was trained on.

A shadow model is trained as the model under attack was, on a part of the candidates. Of every
candidate there are then models that saw it and models that did not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bract.attacks.membership.attackers import LEAST_SPREAD, MEMBERSHIP, ShadowAttacker
from bract.attacks.membership.view import ModelView, losses, scaled_confidence

FEW = 64
"""Shadow models below which one variance serves for all candidates (Carlini et al. 2022, VI-C)."""


@MEMBERSHIP.register("lira-shadow")
class ShadowLiRA(ShadowAttacker):
    """Online LiRA (Carlini et al. 2022, algorithm 1).

    The scaled confidence is taken for normal over the models that saw a candidate, and over those
    that did not; the score is the logarithm of the ratio of the two densities.
    """

    name = "lira-shadow"
    title = "LiRA, shadow models"

    def score(self, view: ModelView) -> Tensor:
        """Return the log likelihood ratio."""
        own = scaled_confidence(view.local, view.labels, view.kind)
        seen = scaled_confidence(view.shadows, view.labels, view.kind)
        return _density(own, seen, view.inside) - _density(own, seen, ~view.inside)


@MEMBERSHIP.register("rmia-shadow")
class ShadowRMIA(ShadowAttacker):
    """Online RMIA (Zarifzadeh, Liu and Shokri, ICML 2024, equation 2).

    ``p(x | w) / p(x)`` with p(x) the mean over models that saw x and models that did not, alike.
    The share of a population that x dominates only grows with it, so the order is RMIA's for every
    population and gamma, without the ties of a share.
    """

    name = "rmia-shadow"
    title = "RMIA, shadow models"

    def score(self, view: ModelView) -> Tensor:
        """Return the logarithm of the ratio."""
        own = -losses(view.local, view.labels, view.kind)
        logs = -losses(view.shadows, view.labels, view.kind)
        return own - torch.logaddexp(
            _log_mean(logs, view.inside), _log_mean(logs, ~view.inside)
        ).sub(np.log(2.0))


@MEMBERSHIP.register("calibrated-shadow")
class Calibrated(ShadowAttacker):
    """Scaled confidence less its mean over models that did not see the candidate.

    Difficulty calibration (Watson et al., ICLR 2022).
    """

    name = "calibrated-shadow"
    title = "Confidence above that of models without the record"

    def score(self, view: ModelView) -> Tensor:
        """Return the difference."""
        own = scaled_confidence(view.local, view.labels, view.kind)
        seen = scaled_confidence(view.shadows, view.labels, view.kind)
        return own - _mean(seen, ~view.inside)


@MEMBERSHIP.register("stacked")
class Stacked(ShadowAttacker):
    """The three above together, by a logistic regression that is fitted on the shadow models.

    Each shadow model is attacked with the help of the others; whom it was trained on is known, so
    no candidate's membership in the model under attack is used.
    """

    name = "stacked"
    title = "Stacked signals, fitted on shadow models"

    def lacks(self, view: ModelView) -> str | None:
        """Name the shadow models where one less would be too few."""
        fewer = replace(view, shadows=view.shadows[1:], inside=view.inside[1:])
        return super().lacks(fewer)

    def score(self, view: ModelView) -> Tensor:
        """Return the regression's decision function."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        features, members = [], []
        for position, shadow in enumerate(view.shadows):
            rest = torch.arange(len(view.shadows)) != position
            inside = view.inside[rest]
            # Without this model some candidate may be in all of the others, or in none.
            apart = inside.any(0) & ~inside.all(0)
            seen = replace(view, local=shadow, shadows=view.shadows[rest], inside=inside)
            features.append(_signals(seen)[apart])
            members.append(view.inside[position][apart])
        fit = make_pipeline(StandardScaler(), LogisticRegression())
        fit.fit(torch.cat(features).numpy(), torch.cat(members).numpy())
        found = fit.decision_function(_signals(view).numpy())
        return torch.from_numpy(np.asarray(found, dtype=np.float64))


def parts(count: int, shadows: int, *, share: float, seed: int) -> Tensor:
    """Return which of ``count`` candidates each shadow model is trained on, bool ``(S, count)``.

    Each is trained on the same number of them, drawn anew; the numbers of models that two
    candidates are in differ by one at most.

    Parameters
    ----------
    share
        Of the candidates that one model is trained on, in (0, 1); it is kept to [0.25, 0.75], so
        that every candidate has models with and without it.
    """
    chosen = round(count * min(0.75, max(0.25, share)))
    generator = torch.Generator().manual_seed(seed)
    times = torch.zeros(count)
    found = torch.zeros(shadows, count, dtype=torch.bool)
    for row in found:
        least = (times + torch.rand(count, generator=generator)).argsort()[:chosen]
        row[least] = True
        times[least] += 1
    return found


def _signals(view: ModelView) -> Tensor:
    """Return the scores that are stacked, ``(N, 3)``, and the confidence itself."""
    scores = [kind().score(view) for kind in (ShadowLiRA, ShadowRMIA, Calibrated)]
    found = torch.stack([*scores, scaled_confidence(view.local, view.labels, view.kind)], 1)
    return found.nan_to_num().clamp(-1e6, 1e6)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of each candidate's values ``(S, N)`` over the chosen models, ``(N,)``."""
    return torch.where(chosen, values, 0.0).sum(0) / chosen.sum(0)


def _log_mean(logs: Tensor, chosen: Tensor) -> Tensor:
    whole = torch.where(chosen, logs, -torch.inf).logsumexp(0)
    return whole - chosen.sum(0).to(logs).log()


def _density(own: Tensor, seen: Tensor, chosen: Tensor) -> Tensor:
    """Return the normal log density of ``own`` ``(N,)`` over the chosen of ``seen`` ``(S, N)``."""
    mean = _mean(seen, chosen)
    squared = torch.where(chosen, (seen - mean).square(), 0.0)
    counts = chosen.sum(0)
    variance = squared.sum(0) / (counts - 1).clamp_min(1)
    if len(seen) < FEW:
        variance = (squared.sum() / (counts.sum() - len(mean)).clamp_min(1)).expand(mean.shape)
    spread = variance.sqrt().clamp_min(LEAST_SPREAD)
    return -((own - mean) / spread).square() / 2 - spread.log()
