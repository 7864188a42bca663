"""Tokens behind the gradient of a low-rank adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.stages import inputs_of
from bract.attacks.methods.token_span.text_update import TextUpdate
from bract.attacks.problem.site import Site
from bract.attacks.reading.span import Span

KEPT = 4096
"""Tokens that a first look keeps, by the largest share of their embedding inside the subspace."""

_PAIRS = 1 << 15
"""Tokens at positions that compete, by the same share."""

_HELD = 1 << 27
"""Numbers of embeddings that are held in memory."""

_AT_ONCE = 32768

_SPARE = 8
"""Tokens that a pursuit may choose beyond those that the longest sequences hold."""


@dataclass(frozen=True)
class Pursued:
    """Tokens and positions, in the order in which they were chosen.

    Attributes
    ----------
    tokens, positions
        int64 ``(N,)``.
    unexplained
        Directions of the subspace that no chosen token explains; 0 where all of them are.
    """

    tokens: Tensor
    positions: Tensor
    unexplained: int


def adapter_texts(
    update: TextUpdate,
    span: Span,
    count: int,
    generator: torch.Generator,
    stop: Callable[[], bool],
) -> list[Tensor]:
    """Return the texts of an adapter's gradient, int64 ``(length,)`` each.

    Several texts are separated by their slopes.

    Parameters
    ----------
    span
        Of what entered the first layers, in all rounds that show it.
    """
    local, length, padding = update.stages.local, update.schema.length, update.schema.padding
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
        rows_of_rounds(update, update.strongest),
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


def rows_of_rounds(update: TextUpdate, site: Site) -> Tensor:
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


@torch.no_grad()
def pursue(
    model: nn.Module,
    layer: Site,
    span: Span,
    tokens: Tensor,
    *,
    length: int,
    most: int,
    each: int,
    stop: Callable[[], bool],
) -> Pursued:
    """Return tokens whose embeddings span a subspace that has fewer dimensions than tokens.

    The gradient of an adapter's first factor A, ``(B^T D)^T X``, has as few rows as the adapter has
    ranks: combinations of the embeddings X, not the embeddings. They are a sparse code with common
    support of several vectors in the dictionary of all tokens at all positions, which
    rank-aware order-recursive matching pursuit finds (Davies and Eldar, 2012, "Rank awareness in
    joint sparse recovery", algorithm 3): take the token whose embedding, outside of what is chosen,
    lies nearest to the subspace, outside of what is chosen. Once no more tokens are left than the
    subspace has dimensions, every choice is exact.

    Parameters
    ----------
    span
        Subspace of the adapters' gradients.
    tokens
        Token ids to choose from.
    length
        Positions of a sequence.
    most
        Tokens to choose at most.
    each
        Tokens that a position holds at most: sequences in the update.
    """
    kept = _likely(model, layer, span, tokens, length)
    atoms = embeddings(model, layer, kept, length).flatten(0, 1)
    pairs = _share_inside(span, atoms).topk(min(_PAIRS, len(atoms))).indices
    atoms, tokens_of, position_of = atoms[pairs], kept[pairs // length], pairs % length
    left = atoms.square().sum(dim=-1)
    rest, taken = span.basis, torch.empty(0, span.basis.shape[1], dtype=torch.float64)
    open_pairs, free = torch.ones(len(atoms), dtype=torch.bool), [each] * length
    chosen: list[int] = []
    while len(rest) and len(chosen) < most and bool(open_pairs.any()) and not stop():
        inside = (atoms @ rest.to(atoms.dtype).T).square().sum(dim=-1)
        share = torch.where(open_pairs, inside / left.clamp_min(1e-3 * left.max()), -1.0)
        best = int(share.argmax())
        chosen.append(best)
        open_pairs[best] = False
        position = int(position_of[best])
        free[position] -= 1
        if not free[position]:
            open_pairs[position_of == position] = False
        atom = atoms[best].double()
        fresh = atom - taken.T @ (taken @ atom)
        fresh = fresh - taken.T @ (taken @ fresh)
        fresh = fresh / fresh.norm()
        taken = torch.cat([taken, fresh[None]])
        left = left - (atoms @ fresh.to(atoms.dtype)).square()
        rest = span.without(taken).basis
    order = torch.tensor(chosen, dtype=torch.int64)
    return Pursued(tokens_of[order], position_of[order], len(rest))


def _share_inside(span: Span, inputs: Tensor) -> Tensor:
    """Return the share of the squared norm of inputs ``(..., width)`` in the subspace."""
    inside = (inputs @ span.basis.to(inputs.dtype).T).square().sum(dim=-1)
    return inside / inputs.square().sum(dim=-1).clamp_min(1e-30)


def _likely(model: nn.Module, layer: Site, span: Span, tokens: Tensor, length: int) -> Tensor:
    """Return the tokens with the largest share of their embedding in the subspace."""
    most = max(1, min(KEPT, _HELD // (length * span.basis.shape[1])))
    if len(tokens) <= most:
        return tokens
    shares = []
    for chunk in tokens.split(max(1, _AT_ONCE // length)):
        shares.append(_share_inside(span, embeddings(model, layer, chunk, length)).amax(dim=1))
    return tokens[torch.cat(shares).topk(most).indices]


def embeddings(model: nn.Module, layer: Site, tokens: Tensor, length: int) -> Tensor:
    """Return what enters the layer for each token at each position, ``(N, T, width)``."""
    parts = []
    for chunk in tokens.split(max(1, _AT_ONCE // length)):
        repeated = chunk[:, None].expand(-1, length).contiguous()
        parts.append(inputs_of(model, [layer.layer], repeated)[layer.layer])
    return torch.cat(parts)
