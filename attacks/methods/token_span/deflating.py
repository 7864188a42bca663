"""Take a text that only nearly explains an update out of it, where noise or pruning blurs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bract.models.losses import Loss
from bract.protocol.update import Tensors

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
    best, most = None, _LEAST
    for text in texts:
        own_tokens = text.unique()
        own_tokens = own_tokens[~torch.isin(own_tokens, special)]
        if not len(own_tokens):
            continue
        given = gradients[embedding][own_tokens]
        slopes = _slopes(model, text, embedding, loss, labels)
        for label, slope in zip(labels, slopes, strict=True):
            rows = torch.stack([slope[text == token].sum(dim=0) for token in own_tokens])
            share, factor = _explained(given, rows)
            if share > most:
                best, most = (text, label, factor), share
    if best is None:
        return None
    text, label, factor = best
    rest, named = dict(gradients), dict(model.named_parameters())
    names = [name for name in named if name in gradients]
    with torch.enable_grad():
        value = loss.mean(model(text[None]), torch.tensor([label]))
        own = torch.autograd.grad(
            value, [named[name].requires_grad_() for name in names], allow_unused=True
        )
    for name, part in zip(names, own, strict=True):
        if part is not None:
            rest[name] = gradients[name] - factor * part
    return text, rest


def _slopes(
    model: nn.Module, text: Tensor, embedding: str, loss: Loss, labels: Sequence[int]
) -> Tensor:
    """Return the slope of a text's loss at each token's embedding, ``(labels, T, width)``."""
    entered: list[Tensor] = []

    def watch(_: nn.Module, __: object, vectors: Tensor) -> Tensor:
        entered.append(vectors.detach().requires_grad_())
        return entered[-1]

    handle = model.get_submodule(embedding.rpartition(".")[0]).register_forward_hook(watch)
    try:
        with torch.enable_grad():
            outputs = model(text.expand(len(labels), -1))
            value = loss.mean(outputs, torch.tensor(labels)) * len(labels)
            (found,) = torch.autograd.grad(value, entered[-1])
    finally:
        handle.remove()
    slopes: Tensor = found
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
