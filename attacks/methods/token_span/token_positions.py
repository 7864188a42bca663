"""Positions of tokens, by embeddings whose length a model does not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bract.models import tap

_ORTHOGONAL = 1e-6
"""Cosine between a gradient's row and an embedding up to which float32 makes them orthogonal."""

_DEVIATIONS = 3.0
"""Standard deviations of noise and rounding in a cosine that count as orthogonal."""

_ALONE = 3.0
"""How many times that the cosine at every other position must be."""

_SAME = 1e-4
"""Relative difference up to which two outputs count as equal."""


@torch.no_grad()
def positions_of(
    model: nn.Module, weight: Tensor, gradient: Tensor, tokens: Tensor, length: int
) -> dict[int, int]:
    """Return the position of each token that is at a single position in all texts of an update.

    Where a normalisation follows the sum u of a token's embedding and a position's, as in BERT,
    the loss does not change with the length of u. By Euler's theorem for functions that are
    homogeneous of degree zero its slope at u is orthogonal to u. The row of the embedding's
    gradient of a token that occurs once is that slope, so that the token was at the position p
    with ``row . u(token, p) = 0``. This holds for any number of texts. What counts as zero follows
    from the noise in the rows of absent tokens, and from the digits that the numbers have.

    Parameters
    ----------
    model
        Maps token ids, int64 ``(B, T)``, to outputs.
    weight, gradient
        Of the token embedding, ``(vocabulary, width)``.
    tokens
        Distinct ids, int64.

    Returns
    -------
    dict
        Positions by token; empty where the outputs change with the length of embeddings.
    """
    if not len(tokens) or not _unseen_length(model, tokens, length):
        return {}
    first = tokens[:1]
    summed = _summed(model, first.expand(1, length))
    if summed is None or summed.shape[-1] != weight.shape[1]:
        return {}
    positions = (summed[0] - weight[first]).double()
    absent = torch.ones(len(gradient), dtype=torch.bool)
    absent[tokens] = False
    noise = float(gradient[absent].square().mean().sqrt()) if bool(absent.any()) else 0.0
    rounding = _rounding(gradient[tokens]) / 3.0**0.5
    found = {}
    for token in tokens.tolist():
        row, inputs = gradient[token].double(), positions + weight[token]
        inputs = inputs / inputs.norm(dim=1, keepdim=True).clamp_min(1e-30)
        cosines = (inputs @ row).abs() / row.norm().clamp_min(1e-30)
        nearest, next_one = cosines.topk(2, largest=False).values.tolist()
        spread = rounding * float((inputs[cosines.argmin()] * row).norm())
        limit = _DEVIATIONS * (noise**2 + spread**2) ** 0.5 / max(float(row.norm()), 1e-30)
        limit = max(_ORTHOGONAL, limit)
        if bool(row.any()) and nearest < limit and next_one > _ALONE * limit:
            found[token] = int(cosines.argmin())
    return found


def _rounding(values: Tensor) -> float:
    """Return the relative rounding of numbers, read off the digits that they have."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((values.to(dtype).to(values.dtype) == values).all()):
            return torch.finfo(dtype).eps / 2.0
    return torch.finfo(torch.float32).eps / 2.0


def _unseen_length(model: nn.Module, tokens: Tensor, length: int) -> bool:
    """Return whether outputs stay the same where each position's embeddings are longer by a
    factor.
    """
    ids = tokens[torch.arange(length) % len(tokens)][None]
    factors = torch.linspace(0.5, 2.0, length)[:, None]
    plain: Any = model(ids)
    embeddings = tap.named(model, nn.Embedding)
    with tap.leaving(model, embeddings, lambda _, value: value * factors.to(value)):
        longer: Any = model(ids)
    if not isinstance(plain, Tensor) or not isinstance(longer, Tensor):
        return False
    return bool((plain - longer).norm() <= _SAME * plain.norm())


def _summed(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Return the sum of all embeddings of ids ``(1, T)``, ``(1, T, width)``; None if none are."""
    parts: list[Tensor] = []
    embeddings = tap.named(model, nn.Embedding)
    with tap.leaving(model, embeddings, lambda _, value: parts.append(value)):
        model(ids)
    if not parts or len({part.shape[1:] for part in parts}) != 1:
        return None
    return torch.stack([part.expand(1, *part.shape[1:]) for part in parts]).sum(dim=0)
