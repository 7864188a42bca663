"""Take a text that only nearly explains an update out of it, where noise or pruning blurs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    labels: Iterable[int],
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
    names = [name for name, _ in model.named_parameters() if name in gradients]
    parameters = [dict(model.named_parameters())[name].requires_grad_() for name in names]
    most, found = _LEAST, None
    every = list(labels)
    for text in texts:
        own_tokens = text.unique()
        own_tokens = own_tokens[~torch.isin(own_tokens, special)]
        rows = gradients[embedding][own_tokens]
        for label in every:
            with torch.enable_grad():
                value = loss.mean(model(text[None]), torch.tensor([label]))
                own = torch.autograd.grad(value, parameters, allow_unused=True)
            mine = own[names.index(embedding)]
            if mine is None:
                return None
            share, factor = _explained(rows, mine[own_tokens])
            if share > most:
                most, found = share, (text, factor, own)
    if found is None:
        return None
    text, factor, own = found
    rest = dict(gradients)
    for name, part in zip(names, own, strict=True):
        if part is not None:
            rest[name] = gradients[name] - factor * part
    return text, rest


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
