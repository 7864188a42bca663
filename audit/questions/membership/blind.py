"""What candidates reveal without any model: if it is much, the candidates are no fair test.

Das, Zhang and Tramer 2024, "Blind baselines beat membership inference attacks for foundation
models": where members and non-members were drawn differently, a classifier that sees no model tells
them apart, and an attacker's success says nothing about the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bract.audit.questions.membership.score import Array, Flags, auc

UNFAIR = 0.001
"""Probability below which the blind classifier's success is no chance. Small, since it refuses the
question: one fair client in a thousand is refused."""

SIDE = 8
"""Side to which images are reduced."""


@dataclass(frozen=True)
class Blind:
    """Area under the curve of the blind classifier on records it was not fitted on, and how likely
    such an area is by chance."""

    auc: float
    chance: float


def blind_score(images: Tensor, labels: Tensor, members: Flags, *, seed: int) -> Blind:
    """Fit classifiers on candidates alone; score each candidate by a fit without it.

    Features are pixels at no more than 8 x 8, mean, deviation and range of each channel, and the
    label. A regularised logistic regression and a random forest are averaged by rank. Fitted on
    either half, they score the other, of which they saw nothing: ``chance`` is the smaller
    probability of the two rank tests, doubled, and ``auc`` the mean. Folds that share what they
    were fitted on would refuse more fair clients than `UNFAIR` says.

    Parameters
    ----------
    images, labels
        float32 ``(N, ...)``, as an input's `features`, and ``(N,)`` or ``(N, T)``.
    members
        bool ``(N,)``.
    """
    from scipy.stats import mannwhitneyu, rankdata
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features = _features(images, labels)
    areas, chances = [], []
    halves = StratifiedKFold(2, shuffle=True, random_state=seed)
    for fitted, left in halves.split(features, members):
        score = np.zeros(len(left))
        for model in (
            make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200)),
            RandomForestClassifier(60, min_samples_leaf=3, random_state=seed, n_jobs=1),
        ):
            model.fit(features[fitted], members[fitted])
            score += rankdata(model.predict_proba(features[left])[:, 1]) / len(left)
        yes, no = score[members[left]], score[~members[left]]
        areas.append(auc(yes, no))
        chances.append(float(mannwhitneyu(yes, no, alternative="greater").pvalue))
    return Blind(float(np.mean(areas)), min(1.0, 2 * min(chances)))


def _features(images: Tensor, labels: Tensor) -> Array:
    flat = images.flatten(2) if images.dim() > 2 else images.flatten(1)[:, None]
    # A feature of a row is a channel of one value, which has no deviation.
    spread = flat.std(-1, correction=min(1, flat.shape[-1] - 1))
    parts = [flat.mean(-1), spread, flat.amin(-1), flat.amax(-1)]
    small = images
    if images.dim() == 4 and max(images.shape[2:]) > SIDE:
        small = F.adaptive_avg_pool2d(images, SIDE)
    few = labels.dim() == 1 and not labels.is_floating_point() and int(labels.max()) < 100
    classes = F.one_hot(labels) if few else labels.view(len(labels), -1)
    parts += [small.flatten(1), classes.to(images.dtype)]
    found: NDArray[np.float64] = np.concatenate([p.numpy().astype(np.float64) for p in parts], 1)
    return found
