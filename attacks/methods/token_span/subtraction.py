"""Take texts that were found out of an update, which leaves that of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bract.models.losses import Loss
from bract.updates.update import Tensors

_EXPLAINED, _VANISHED = 3e-5, 1e-3
"""Share of a token's row that may be left where its text explains it: of the nearest one, which
decides, and of others, which are then gone."""


def subtracted(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    text: Tensor,
    *,
    embedding: str,
    weight: float,
    loss: Loss,
    labels: Iterable[Tensor],
) -> tuple[Tensors, Tensor] | None:
    """Return the gradients of a batch's other texts, and the text's label; None if it has none.

    The gradient of a batch is the mean of its texts'. The row of the embedding's gradient of a
    token that one text alone has is that text's, so that it vanishes with the text, if the text
    and its label are right, and with no other.

    Parameters
    ----------
    gradients
        By parameter, of the mean loss.
    text
        Token ids, int64 ``(T,)``.
    embedding
        Name of the token embedding's weight.
    weight
        Share of the text in the mean: 1 over the texts of the batch.
    loss
        Of outputs ``(1, K)`` and a label.
    labels
        Those that are tried: int64 ``(1,)`` each, or ``(1, T)`` where every token has one.
    """
    names = [name for name, _ in model.named_parameters() if name in gradients]
    parameters = [dict(model.named_parameters())[name].requires_grad_() for name in names]
    tokens = text.unique()
    before = gradients[embedding][tokens].norm(dim=1)
    best: tuple[tuple[Tensor | None, ...], Tensor] | None = None
    least, vanished = _EXPLAINED, tokens[:0]
    for label in labels:
        with torch.enable_grad():
            value = weight * loss.mean(model(text[None]), label)
            own: tuple[Tensor | None, ...] = torch.autograd.grad(
                value, parameters, allow_unused=True
            )
        row = own[names.index(embedding)]
        if row is None:
            return None
        left = (gradients[embedding][tokens] - row[tokens]).norm(dim=1)
        ratios = torch.where(before > 0.0, left / before.clamp_min(1e-30), 1.0)
        if float(ratios.min()) < least:
            best, least, vanished = (own, label), float(ratios.min()), tokens[ratios < _VANISHED]
    if best is None:
        return None
    found = dict(gradients)
    for name, part in zip(names, best[0], strict=True):
        found[name] = gradients[name] if part is None else gradients[name] - part
    found[embedding][vanished] = 0.0
    return found, best[1]
