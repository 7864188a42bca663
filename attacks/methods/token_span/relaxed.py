"""Texts by descent on mixtures of tokens, where no single token brings a subspace nearer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.sequences import Candidates, Checked
from bract.attacks.methods.token_span.stages import inputs_while
from bract.models import tap

_RESTARTS, _STEPS = 4, 60
"""Descents at once, and steps of each."""

_RATE = 0.3
"""Step of Adam on logits."""

_COLDEST = 0.1
"""Temperature at the last step; 1 at the first."""

_PLACED = 4.0
"""Logit at which a placed token starts; others start near 0."""


def relax(
    model: nn.Module,
    checked: Checked,
    allowed: Candidates,
    placed: Mapping[int, int],
    *,
    embedding: str,
    generator: torch.Generator,
) -> Tensor:
    """Return a sequence by TIGER's objective (2606.18312), int64 ``(T,)``.

    Each position holds a mixture of the embeddings of the tokens that are allowed there. Adam
    lowers the mean square of the distances of what enters the contextual layers from their
    subspaces, which the mixtures change smoothly, while a falling temperature makes them single
    tokens. Of some restarts the one whose single tokens are nearest is returned. TIGER descends
    on free embeddings and projects them at the end; mixtures need no projection.

    Parameters
    ----------
    allowed
        Tokens at each position.
    placed
        Tokens by position at which the descents start.
    embedding
        Name of the token embedding's weight.
    """
    tokens = torch.cat(allowed.tokens).unique()
    table = model.get_parameter(embedding).detach()[tokens]
    closed = torch.stack([~torch.isin(tokens, here) for here in allowed.tokens])
    length = len(allowed.tokens)
    logits = 0.1 * torch.randn(_RESTARTS, length, len(tokens), generator=generator)
    for position, token in placed.items():
        if position < length:
            logits[:, position, tokens == token] = _PLACED
    logits = logits.masked_fill(closed, -1e4).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=_RATE)
    stand_in = tokens[:1].expand(_RESTARTS, length)
    table_of = embedding.removesuffix(".weight")
    for step in range(_STEPS):
        temperature = _COLDEST ** (step / max(1, _STEPS - 1))
        with torch.enable_grad():
            mixed = ((logits / temperature).softmax(dim=-1) @ table).to(table)
            with tap.leaving(model, [table_of], partial(_put, mixed)):
                entering = inputs_while(
                    lambda: model(stand_in), model, checked.modules, (_RESTARTS, length)
                )
            apart = checked.of([entering[name] for name in checked.modules]).square().mean()
            (slope,) = torch.autograd.grad(apart, [logits])
        logits.grad = slope.masked_fill(closed, 0.0)
        optimizer.step()
    found = tokens[logits.detach().argmax(dim=-1)]
    with torch.no_grad():
        nearest = checked.distances(model, found).square().mean(dim=1).argmin()
    chosen: Tensor = found[nearest]
    return chosen


def _put(mixed: Tensor, _: str, __: Tensor) -> Tensor:
    return mixed
