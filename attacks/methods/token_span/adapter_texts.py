"""Texts behind the gradient of a low-rank adapter, whose rows are too few for a span."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.pursuit import embeddings, pursue
from bract.attacks.methods.token_span.text_update import TextUpdate
from bract.attacks.reading.site import Site
from bract.attacks.reading.span import span_of_rounds

_SPARE = 8
"""Tokens that a pursuit may choose beyond those that the longest sequences hold."""


def adapter_texts(
    update: TextUpdate, count: int, generator: torch.Generator, stop: Callable[[], bool]
) -> list[Tensor]:
    """Return the texts of an adapter's gradient, int64 ``(length,)`` each.

    Several texts are separated by their slopes.
    """
    local, length, padding = update.stages.local, update.schema.length, update.schema.padding
    rows = {site: _rows_of_rounds(update, site) for site in local}
    span = span_of_rounds(list(rows.values()))
    found = pursue(
        update.model,
        local[0],
        span,
        update.tokens,
        length=length,
        most=min(count * length + _SPARE, span.basis.shape[1] - 1),
        each=count,
        stop=stop,
    )
    tokens, positions = found.tokens, found.positions
    if count == 1:
        text = torch.full((length,), padding)
        text[positions] = tokens
        return [text]
    distinct = tokens.unique()
    bags = bags_of(
        distinct,
        embeddings(update.model, local[0], distinct, length),
        rows[update.strongest],
        count=count,
        special=update.special,
        generator=generator,
    )
    texts = []
    for bag in bags:
        text = torch.full((length,), padding)
        own = torch.cat([bag.tokens, update.special])
        mine = torch.isin(tokens, own) & (positions < bag.length)
        # Earlier choices are surer, so they are placed last.
        text[positions[mine].flip(0)] = tokens[mine].flip(0)
        lacking = bag.tokens[~torch.isin(bag.tokens, text)]
        free = (text[: bag.length] == padding).nonzero().flatten()
        text[free[: len(lacking)]] = lacking[: len(free)]
        texts.append(text)
    return texts


def _rows_of_rounds(update: TextUpdate, site: Site) -> Tensor:
    """Return a layer's gradient, below those of earlier rounds where these have the same texts.

    What enters a layer below which nothing is trained is the same in every round.
    """
    declared = update.case.observation.declaration
    rows = [update.rows(site)]
    batch, examples = declared.batch_size, declared.num_examples
    if batch is not None and examples is not None and batch >= examples:
        for seen in update.case.known.history if not declared.defenses else ():
            earlier = seen.gradient().get(site.weight)
            if earlier is not None and bool(earlier.any()):
                rows.append(site.turned(earlier.detach().cpu().float()))
    return torch.cat([one / one.norm().clamp_min(1e-30) for one in rows])
