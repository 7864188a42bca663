"""Tokens of an update whose output layer shares the embedding, by the sign and size of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 12.0
"""Median deviations above the median from which on the logarithm of a row's size stands out; chosen
on the split ``choose`` of `experiments.tied_rows`."""


def softmax_share(gradient: Tensor) -> Tensor:
    """Return the direction that most rows of a tied embedding's gradient share, ``(width,)``.

    The output layer's part of row v is the mean over positions t of ``(p_tv - [y_t = v]) h_t``,
    with p the predictions, y the next tokens and h the last features. The few rows of tokens that
    were next or at the input apart, it is a positive combination of all h. The coordinates' median
    over rows of unit length is that direction, whatever those few hold.

    Parameters
    ----------
    gradient
        ``(vocabulary, width)``.
    """
    rows = gradient.double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    middle = rows.median(dim=0).values
    share: Tensor = middle / middle.norm().clamp_min(1e-30)
    return share


def rows_of_other_sign(gradient: Tensor) -> Tensor:
    """Return the rows that point away from `softmax_share`, int64 ``(N,)``.

    That of a next token does: ``p_tv - 1`` is negative there and outweighs its predictions
    elsewhere.
    """
    found: Tensor = (gradient.double() @ softmax_share(gradient) < 0.0).nonzero().flatten()
    return found


def rows_of_other_size(gradient: Tensor, *, size: float = SIZE) -> Tensor:
    """Return the rows that are larger across `softmax_share` than most, int64 ``(N,)``.

    Tokens of the input add the slope at their embedding, next tokens a feature of their own; both
    are as many times larger than the softmax's share as there are tokens in the vocabulary while
    predictions are even.
    """
    rows, share = gradient.double(), softmax_share(gradient)
    apart = (rows - (rows @ share)[:, None] * share).norm(dim=1).clamp_min(1e-30).log()
    middle = apart.median()
    spread = (apart - middle).abs().median()
    found: Tensor = (apart > middle + size * spread).nonzero().flatten()
    return found


def tokens_of_tied_rows(gradient: Tensor, *, size: float = SIZE) -> Tensor:
    """Return the token ids that an update's texts hold, int64 ``(N,)``: of another sign or size.

    While predictions are even the sign alone finds every next token. A trained model predicts some
    tokens of a text elsewhere too, so that their rows keep the sign; the size finds those.

    Parameters
    ----------
    gradient
        Of the embedding that the output layer shares, ``(vocabulary, width)``.
    """
    found: Tensor = torch.cat(
        [rows_of_other_sign(gradient), rows_of_other_size(gradient, size=size)]
    ).unique()
    return found


class NextTokens:
    """Which tokens follow a prefix, by the rows of a tied embedding's gradient.

    Outside of `softmax_share`, row v is minus the weighted sum of the features h before each v that
    was a next token, and what the embedding of v adds as input. A prefix that v followed has a
    feature that points away from the row, and takes its weight of the row with it.

    Parameters
    ----------
    gradient
        Of the embedding that the output layer shares, ``(vocabulary, width)``.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._share = softmax_share(gradient).to(gradient)
        self._rows = -self._outside(gradient)

    def scores(self, features: Tensor, tokens: Tensor, *, weight: float) -> Tensor:
        """Return how well tokens follow features ``(N, width)``, ``(N, len(tokens))`` in [-1, 1].

        The mean of the cosine and of the share of the expected weight that the row holds: a token
        that followed many features has small cosines with each, but holds the weight of all.
        """
        own, rows = self._outside(features), self._rows[tokens]
        inside = own @ rows.T
        size = own.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        cosines = inside / size / rows.norm(dim=-1).clamp_min(1e-30)
        shares = (inside / size.square() / weight).clamp(-1.0, 1.0)
        found: Tensor = 0.5 * (cosines + shares)
        return found

    def remove(self, features: Tensor, tokens: Tensor, *, weight: float) -> None:
        """Take a text's features ``(T, width)`` out of the rows of its next tokens ``(T,)``."""
        for feature, token in zip(self._outside(features), tokens.tolist(), strict=True):
            inside = float(feature @ self._rows[token] / feature.square().sum().clamp_min(1e-30))
            self._rows[token] -= min(max(inside, 0.0), weight) * feature

    def _outside(self, vectors: Tensor) -> Tensor:
        return vectors - (vectors @ self._share)[..., None] * self._share
