"""Assemble sequences from tokens that a gradient's subspace admits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.linking import Linked
from bract.attacks.methods.token_span.span import Span, separating
from bract.attacks.methods.token_span.stages import Layer, inputs_of

AT_ONCE = 32768
"""Tokens in one forward pass, of at least one sequence."""

MOST_BEAMS = 256

CERTAIN = 5.0
"""How many times farther from the subspaces every change of one token must lead."""

_SWEEPS = 6
"""Most passes over the positions of a sequence from one start."""


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be at each position.

    Attributes
    ----------
    tokens
        Token ids at each position, int64, those nearest to the subspace first.
    threshold
        Distance below which a token counts as present.
    """

    tokens: tuple[Tensor, ...]
    threshold: float


@dataclass(frozen=True)
class Checked:
    """Contextual layers, with the subspace of each."""

    layers: tuple[Layer, ...]
    spans: tuple[Span, ...]

    def distances(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return the distance of each position of sequences ``(N, T)`` from the subspaces."""
        parts = []
        names = [layer.module for layer in self.layers]
        for chunk in ids.split(max(1, AT_ONCE // ids.shape[1])):
            entering = inputs_of(model, names, chunk)
            apart = [
                span.distance(entering[layer.module])
                for layer, span in zip(self.layers, self.spans, strict=True)
            ]
            parts.append(torch.stack(apart).amax(dim=0))
        return torch.cat(parts)


@torch.no_grad()
def local_distances(
    model: nn.Module, layer: Layer, span: Span, tokens: Tensor, length: int
) -> Tensor:
    """Return the distance of each token at each position, ``(len(tokens), length)``."""
    parts = []
    for chunk in tokens.split(max(1, AT_ONCE // length)):
        repeated = chunk[:, None].expand(-1, length).contiguous()
        parts.append(span.distance(inputs_of(model, [layer.module], repeated)[layer.module]))
    return torch.cat(parts)


def candidates_of(distances: Tensor, tokens: Tensor, rank: int) -> Candidates | None:
    """Return the tokens at each position that lie in the subspace; None if none stand out.

    Parameters
    ----------
    distances
        ``(len(tokens), T)`` of `local_distances`.
    rank
        Dimensions of the subspace; at most so many tokens, at each position, are expected.
    """
    threshold = separating(distances, 4 * rank * distances.shape[1])
    if threshold is None:
        return None
    found = []
    for apart in distances.T:
        order = apart.argsort()
        found.append(tokens[order[: int((apart < threshold).sum())]])
    return Candidates(tuple(found), threshold)


@torch.no_grad()
def extend(
    model: nn.Module, checked: Checked, given: Candidates, stop: Callable[[], bool]
) -> list[Tensor]:
    """Return the sequences of a causal model, each grown token by token (DAGER, algorithm 2).

    The input of a contextual layer depends on earlier tokens alone: a prefix is kept while it lies
    in the layer's subspace, and ends where no token continues it.

    Parameters
    ----------
    stop
        Says when the time is up; what has grown until then is returned.
    """
    beams = torch.empty(1, 0, dtype=torch.int64)
    ended: list[Tensor] = []
    for tokens in given.tokens:
        if not len(tokens) or stop():
            break
        longer = torch.cat(
            [beams.repeat_interleave(len(tokens), 0), tokens.repeat(len(beams))[:, None]], dim=1
        )
        apart = checked.distances(model, longer)[:, -1]
        limit = min(given.threshold, separating(apart, len(apart)) or given.threshold)
        keep = (apart < limit).nonzero().flatten()
        keep = keep[apart[keep].argsort()][:MOST_BEAMS]
        continued = set((keep // len(tokens)).tolist())
        ended += [beam for i, beam in enumerate(beams) if i not in continued and len(beam)]
        beams = longer[keep]
        if not len(beams):
            break
    return ended + list(beams)


@torch.no_grad()
def assemble(
    model: nn.Module,
    checked: Checked,
    given: Candidates,
    *,
    linked: Linked,
    ends: Tensor,
    special: Tensor,
    count: int,
    generator: torch.Generator,
    stop: Callable[[], bool],
) -> list[Tensor]:
    """Return sequences of a model whose tokens see each other, best first.

    From tokens whose slopes go together with those of one of them, one position after the other
    takes the token that brings all inputs of the contextual layers nearest to their subspaces,
    until nothing changes. A sequence counts as found where every change of one token would lead
    much farther away. Once every token has been tried, searches start from random tokens.

    Parameters
    ----------
    ends
        Lengths that a sequence can have, int64.
    count
        Sequences to find.
    """
    found: dict[tuple[int, ...], float] = {}
    certain: set[tuple[int, ...]] = set()
    seeds = torch.randperm(len(linked.tokens), generator=generator).tolist()
    while not stop() and len(certain) < count:
        explained = {(token, place) for one in certain for place, token in enumerate(one)}
        pairs = list(zip(linked.tokens.tolist(), linked.positions.tolist(), strict=True))
        seeds = [seed for seed in seeds if pairs[seed] not in explained]
        start = (
            linked.text(seeds.pop(), ends.tolist(), special)
            if seeds
            else _random_start(given, ends, generator)
        )
        sequence, apart, margin = _settle(model, checked, given, start, stop)
        key = tuple(sequence.tolist())
        found[key] = apart
        if margin >= CERTAIN and apart < given.threshold:
            certain.add(key)
        if all(len(tokens) == 1 for tokens in given.tokens[: len(sequence)]):
            break
    best = sorted(found, key=lambda one: (one not in certain, found[one]))[:count]
    return [torch.tensor(one) for one in best]


def _random_start(given: Candidates, ends: Tensor, generator: torch.Generator) -> Tensor:
    length = int(ends[torch.randint(len(ends), (1,), generator=generator)])
    return torch.stack(
        [
            tokens[torch.randint(len(tokens), (1,), generator=generator)][0]
            for tokens in given.tokens[:length]
        ]
    )


def _settle(
    model: nn.Module,
    checked: Checked,
    given: Candidates,
    sequence: Tensor,
    stop: Callable[[], bool],
) -> tuple[Tensor, float, float]:
    """Return where a descent ends, its distance, and how many times farther one change leads."""
    apart = float(checked.distances(model, sequence[None]).amax())
    margin = float("inf")
    for _ in range(_SWEEPS):
        before, margin = sequence.clone(), float("inf")
        for position in range(len(sequence)):
            tokens = given.tokens[position]
            if len(tokens) < 2 or stop():
                continue
            trials = sequence.repeat(len(tokens), 1)
            trials[:, position] = tokens
            distances = checked.distances(model, trials)
            means = distances.mean(dim=1)
            best = int(means.argmin())
            sequence, apart = trials[best], float(distances[best].amax())
            others = means[torch.arange(len(means)) != best]
            margin = min(margin, float(others.min() / means[best].clamp_min(1e-12)))
        if bool((sequence == before).all()):
            break
    return sequence, apart, margin
