"""Take a text that only nearly explains an update out of it, where noise or pruning blurs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.models import tap
from bract.models.losses import Loss
from bract.updates.update import Tensors

_LEAST = 0.3
"""Share of its tokens' rows that a text must explain; chosen on texts that score nothing."""


def deflate(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    texts: Sequence[Tensor],
    *,
    embedding: str,
    special: Tensor,
    loss: Loss,
    labels: Sequence[int],
) -> tuple[Tensor, Tensors] | None:
    """Return the text that explains most of its tokens' rows, and the gradients without it.

    The gradient of a batch is the sum of its texts', each times one factor: the share of the text
    in the mean, and what clipping left of it. A text with its label explains the rows of the
    embedding's gradient that its tokens have, by least squares with that factor; a wrong one, or
    one with a wrong label, explains less of them. Of coordinates that pruning set to zero the text
    itself is the best estimate, so that the factor is fitted to the others and applied to all.

    Parameters
    ----------
    gradients
        By parameter.
    texts
        Candidates, token ids int64 ``(T,)`` each.
    embedding
        Name of the token embedding's weight.
    special
        Tokens of every text, whose rows show none.
    labels
        Those that are tried.

    Returns
    -------
    tuple or None
        None if no text explains enough.
    """
    tried = [
        one
        for text in texts
        if (one := _best_label(model, gradients, text, embedding, special, loss, labels)).share
        > _LEAST
    ]
    if not tried:
        return None
    best = max(tried, key=lambda one: one.share)
    # A text that goes on where the best one ends has rows of more tokens to explain.
    begins = best.text[:-1]
    longer = [one for one in tried if torch.equal(one.text[: len(begins)], begins)]
    best = max(longer, key=lambda one: one.explained)
    rest, named = dict(gradients), dict(model.named_parameters())
    names = [name for name in named if name in gradients]
    with torch.enable_grad():
        value = loss.mean(model(best.text[None]), torch.tensor([best.label]))
        own = torch.autograd.grad(
            value, [named[name].requires_grad_() for name in names], allow_unused=True
        )
    for name, part in zip(names, own, strict=True):
        if part is not None:
            rest[name] = gradients[name] - best.factor * part
    return best.text, rest


@dataclass(frozen=True)
class _Tried:
    """A text with the label that explains most, its factor, and how much of its rows it does."""

    text: Tensor
    label: int
    factor: float
    share: float
    explained: float


def _best_label(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    text: Tensor,
    embedding: str,
    special: Tensor,
    loss: Loss,
    labels: Sequence[int],
) -> _Tried:
    tokens = text.unique()
    tokens = tokens[~torch.isin(tokens, special)]
    best = _Tried(text, 0, 0.0, 0.0, 0.0)
    if not len(tokens):
        return best
    given = gradients[embedding][tokens]
    size = float(given.double().square().sum())
    slopes = _slopes(model, text, embedding, loss, labels)
    for label, slope in zip(labels, slopes, strict=True):
        rows = torch.stack([slope[text == token].sum(dim=0) for token in tokens])
        share, factor = _explained(given, rows)
        if share > best.share:
            best = _Tried(text, label, factor, share, share * size)
    return best


def _slopes(
    model: nn.Module, text: Tensor, embedding: str, loss: Loss, labels: Sequence[int]
) -> Tensor:
    """Return the slope of a text's loss at each token's embedding, ``(labels, T, width)``."""
    entered: list[Tensor] = []

    def watch(_: str, vectors: Tensor) -> Tensor:
        entered.append(vectors.detach().requires_grad_())
        return entered[-1]

    with tap.leaving(model, [embedding.rpartition(".")[0]], watch), torch.enable_grad():
        outputs = model(text.expand(len(labels), -1))
        value = loss.mean(outputs, torch.tensor(labels)) * len(labels)
        slopes: Tensor = torch.autograd.grad(value, entered[-1])[0]
    return slopes


def _explained(rows: Tensor, mine: Tensor) -> tuple[float, float]:
    """Return the share of rows that ``mine``, times a positive factor, explains, and the factor.

    Both ``(N, width)``; coordinates at which the rows are zero do not count.
    """
    given = rows.double()
    own = torch.where(given == 0.0, 0.0, mine.double())
    size = float(own.square().sum())
    factor = float((given * own).sum()) / max(size, 1e-30)
    if factor <= 0.0:
        return 0.0, 0.0
    left = float((given - factor * own).square().sum())
    return 1.0 - left / max(float(given.square().sum()), 1e-30), factor
