"""Sequences of a causal model by its next tokens, where later layers' subspaces are full."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.prefixes import Prefixes
from bract.attacks.methods.token_span.stages import inputs_of
from bract.attacks.methods.token_span.tied_rows import NextTokens

_BEAMS, _CHILDREN = 128, 6
"""Prefixes that compete, and continuations that are kept of each."""


@torch.no_grad()
def likeliest_texts(
    model: nn.Module,
    output: str,
    next_tokens: NextTokens,
    tokens: Tensor,
    *,
    length: int,
    special: Tensor,
    count: int,
    stop: Callable[[], bool],
) -> list[Tensor]:
    """Return the likeliest texts of a causal language model whose output layer is tied.

    One text after the other is found and taken out of the rows. Prefixes compete by the mean score
    of their next tokens; the feature of a prefix scores all of its next tokens at once, so that a
    step computes each prefix once.

    Parameters
    ----------
    output
        Name of the output layer.
    next_tokens
        Rows of the embedding's gradient, which lose what is found.
    tokens
        Token ids of the update, int64.
    length
        Tokens of the longest text.
    special
        Tokens of which one begins a text and one ends it; without any, all texts are ``length``
        long.
    count
        Texts to return at most; none where no score is a number, as of a model that overflows.
    """
    found: list[Tensor] = []
    while len(found) < count and not stop():
        weight = 1.0 / (count * (length - 1))
        text = _likeliest(model, output, next_tokens, tokens, length, special, weight)
        if len(text) < 2:
            break
        features = inputs_of(model, [output], text[None])[output][0, :-1]
        next_tokens.remove(features, text[1:], weight=1.0 / (count * (len(text) - 1)))
        found.append(text)
    return found


def _likeliest(
    model: nn.Module,
    output: str,
    next_tokens: NextTokens,
    tokens: Tensor,
    length: int,
    special: Tensor,
    weight: float,
) -> Tensor:
    """Return the text with the largest mean score of its next tokens, by a beam of prefixes.

    Where no score is a number it has one token or none.
    """
    begins = tokens[torch.isin(tokens, special)]
    begins = begins if len(begins) else tokens
    if not len(begins):
        return begins
    grown = Prefixes(model, [output])
    grown.keep(torch.zeros(len(begins), dtype=torch.int64), begins)
    totals = torch.zeros(len(begins))
    best, text = -1.0, begins[:1]
    for position in range(1, length):
        scores = next_tokens.scores(grown.features[0], tokens, weight=weight)
        added = scores.topk(min(_CHILDREN, len(tokens)))
        sums = (totals[:, None] + added.values).flatten()
        kept = sums.topk(min(_BEAMS, len(sums))).indices
        parents, last = kept // added.indices.shape[1], tokens[added.indices.flatten()[kept]]
        over = torch.isin(last, special) | (position == length - 1)
        for place in over.nonzero().flatten().tolist():
            if float(sums[kept[place]]) / position > best:
                best = float(sums[kept[place]]) / position
                text = torch.cat([grown.ids[parents[place]], last[place, None]])
        if bool(over.all()):
            break
        grown.keep(parents[~over], last[~over])
        totals = sums[kept[~over]]
    return text
