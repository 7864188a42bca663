"""Which tokens of several texts belong together, by the slopes of the loss at each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_STARTS, _ROUNDS = 24, 30
"""Starts of a clustering, and steps of each."""

_MEMBER = 0.35
"""Share of the largest coefficient from which on a token is in a further text too; chosen on texts
that score nothing."""

_NOISE = 1e-5
"""Share of the largest singular value below which tokens and positions add no direction."""


@dataclass(frozen=True)
class Bag:
    """Tokens of one text in no order.

    Attributes
    ----------
    tokens
        Token ids, as often as the text seems to have them, int64.
    length
        Tokens of the text, as far as slopes at positions tell.
    placed
        Tokens by their position, where it is known.
    """

    tokens: Tensor
    length: int
    placed: Mapping[int, int] = field(default_factory=dict)


def bags_of(
    tokens: Tensor,
    inputs: Tensor,
    gradient: Tensor,
    *,
    count: int,
    special: Tensor,
    generator: torch.Generator,
    places: Mapping[int, int] | None = None,
) -> list[Bag]:
    """Separate the tokens of an update into its texts.

    Once the inputs X of a layer are known, its gradient ``D^T X`` gives the output gradients D. An
    input is nearly the sum of a token's part and a position's, so that the sum of D over a token's
    positions follows from any least-squares solution, and so does that over a position's tokens.
    What the tokens of one text pass on is weighed by the same later gradients: their rows of D
    point one way, those of another text another way. Rows are clustered by direction; tokens in
    several texts have a sum of several directions. Two tokens at one position are in different
    texts.

    Parameters
    ----------
    tokens
        Distinct ids, ``(N,)``.
    inputs
        What enters the layer for each token at each position, ``(N, T, width)``.
    gradient
        ``(outputs, width)``.
    count
        Texts.
    special
        Tokens that are in every text.
    places
        Position of each token that is at a single one.
    """
    length = inputs.shape[1]
    flat = inputs.flatten(0, 1).double()
    gram = flat.T @ flat
    inverse = torch.linalg.pinv(gram, rtol=_NOISE**2, hermitian=True)
    slopes = (flat @ inverse @ gradient.double().T).view(len(tokens), length, -1)
    of_token, of_position = slopes.sum(dim=1), slopes.sum(dim=0)
    own = ~torch.isin(tokens, special)
    rows = of_token[own]
    if not len(rows):
        return []
    ids = tokens[own].tolist()
    places = places or {}
    known = [i for i, token in enumerate(ids) if token in places]
    # Where most texts have tokens at known positions, these are in one text each.
    apart = known if len(known) >= 2 * count else []
    at = torch.tensor([places.get(ids[i], -1) for i in apart or range(len(ids))])
    centres, texts_of = _centres(rows[apart or slice(None)], min(count, len(rows)), generator, at)
    shares = _coefficients(rows, centres)
    placed: list[dict[int, int]] = [{} for _ in centres]
    for i, text in zip(apart, texts_of.tolist(), strict=False):
        placed[text][places[ids[i]]] = ids[i]
    lengths = _lengths(_coefficients(of_position, centres))
    found = []
    for text in range(len(centres)):
        mine = shares[:, text]
        inside = (mine >= _MEMBER * shares.amax(dim=1)) & (mine > 0.0)
        inside |= torch.isin(tokens[own], torch.tensor(list(placed[text].values())))
        length_of = max([lengths[text], *(place + 1 for place in placed[text])])
        rest = length_of - int((~own).sum())
        repeated = _repeated(tokens[own][inside], mine[inside], rest)
        found.append(Bag(repeated, length_of, placed[text]))
    return found


def _repeated(tokens: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Return tokens, each at least once, so often that ``total`` are shared out by their sizes.

    By highest averages (d'Hondt): the next place goes to the token with most for each it has.
    """
    counts = torch.ones(len(tokens), dtype=torch.int64)
    for _ in range(total - len(tokens) if len(tokens) else 0):
        counts[int((sizes / (counts + 1)).argmax())] += 1
    return tokens.repeat_interleave(counts)


def _centres(
    rows: Tensor, count: int, generator: torch.Generator, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Return unit directions near which rows are, ``(count, outputs)``, and each row's, ``(N,)``.

    The best of some starts of spherical k-means. Rows at one place, unless it is -1, have
    different directions, by the best assignment.
    """
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    groups = [(places == place).nonzero().flatten() for place in places.unique() if place >= 0]
    groups = [group for group in groups if 1 < len(group) <= count]
    best, nearest_of_best, most = unit[:count], torch.zeros(len(unit), dtype=torch.int64), -1.0
    for _ in range(_STARTS):
        centres = unit[torch.randint(len(unit), (1,), generator=generator)]
        while len(centres) < count:
            apart = (1.0 - (unit @ centres.T).amax(dim=1)).clamp_min(1e-9).square()
            drawn = torch.multinomial(apart, 1, generator=generator)
            centres = torch.cat([centres, unit[drawn]])
        for _ in range(_ROUNDS):
            nearest = _assigned(unit @ centres.T, groups)
            sums = torch.zeros_like(centres).index_add(0, nearest, unit)
            filled = sums.norm(dim=1) > 0.0
            centres = torch.where(filled[:, None], sums, centres)
            centres = centres / centres.norm(dim=1, keepdim=True)
        cosines = unit @ centres.T
        nearest = _assigned(cosines, groups)
        total = float(cosines.gather(1, nearest[:, None]).sum())
        if total > most:
            best, nearest_of_best, most = centres, nearest, total
    return best, nearest_of_best


def _assigned(cosines: Tensor, groups: Sequence[Tensor]) -> Tensor:
    """Return the nearest direction of each row, different ones within a group."""
    from scipy.optimize import linear_sum_assignment

    nearest = cosines.argmax(dim=1)
    for group in groups:
        members, directions = linear_sum_assignment(-cosines[group].numpy())
        nearest[group[members]] = torch.from_numpy(directions)
    return nearest


def _coefficients(rows: Tensor, centres: Tensor) -> Tensor:
    """Return coefficients of rows in the directions, not negative, ``(N, count)``."""
    import numpy as np
    from scipy.optimize import nnls

    basis = centres.T.numpy()
    return torch.from_numpy(np.stack([nnls(basis, row)[0] for row in rows.numpy()]))


def _lengths(at_positions: Tensor) -> list[int]:
    """Return the length of each text, from its coefficient at each position ``(T, count)``.

    A text is where its coefficient is; the best place to cut is that with the least squares.
    """
    length = len(at_positions)
    found = []
    for values in at_positions.T:
        costs = [
            float((values[:cut] - values[:cut].mean()).square().sum() + values[cut:].square().sum())
            for cut in range(2, length + 1)
        ]
        found.append(2 + min(range(len(costs)), key=lambda i: costs[i]))
    return found
