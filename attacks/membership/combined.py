"""A learned combination of attackers, fitted on other clients than the one that is scored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def combine(
    scores: Mapping[str, Mapping[str, Array]], members: Mapping[str, NDArray[np.bool_]]
) -> dict[str, Array]:
    """Return each client's combined scores ``(N,)``, by a fit on all the other clients'.

    A logistic regression on the ranks of the attackers' scores. An adversary that uses it knows
    which candidates of the *other* clients are members, as one that colludes with them does. No
    candidate is scored by a fit that saw its client.

    Parameters
    ----------
    scores
        Scores ``(N,)`` over rounds by client and attacker; attackers that not all clients have
        are left out.
    members
        Whether each candidate is a member, ``(N,)``, by client.

    Returns
    -------
    dict
        Empty with fewer than two clients, or without a common attacker.
    """
    from sklearn.linear_model import LogisticRegression

    if len(scores) < 2:
        return {}
    names = sorted(set.intersection(*(set(own) for own in scores.values())))
    if not names:
        return {}
    features = {c: np.stack([_ranks(own[n]) for n in names], 1) for c, own in scores.items()}
    found = {}
    for client, own in features.items():
        others = [name for name in features if name != client]
        known = np.concatenate([members[name] for name in others])
        if known.all() or not known.any():
            continue
        fit = LogisticRegression().fit(np.concatenate([features[n] for n in others]), known)
        found[client] = np.asarray(fit.decision_function(own), dtype=np.float64)
    return found


def _ranks(values: Array) -> Array:
    """Return mid-ranks over N, so that clients of other scales compare."""
    from scipy.stats import rankdata

    ranks: Array = rankdata(values) / len(values)
    return ranks
