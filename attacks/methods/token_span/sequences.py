"""Assemble sequences from tokens that a gradient's subspace admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.prefixes import Prefixes
from bract.attacks.methods.token_span.span import Span, separating
from bract.attacks.methods.token_span.stages import Layer, inputs_of

AT_ONCE = 32768
"""Tokens in one forward pass, of at least one sequence."""

MOST_BEAMS = 256

CERTAIN = 5.0
"""How many times farther from the subspaces every change of one token must lead."""

_FEWEST_BEAMS, _BEAMS_EACH = 12, 4
"""Prefixes that compete: at least, and for each sequence that is searched."""

_FEWEST_TRIED, _TRIED_EACH, _CHILDREN = 12, 2, 3
"""Tokens tried after each prefix, likewise, and continuations that are kept of it."""

_SAME_TEXT = 0.7
"""Share of equal positions from which on two sequences are variants of one text."""


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

    @property
    def modules(self) -> list[str]:
        """Names of the modules, in the order of the layers."""
        return [layer.module for layer in self.layers]

    def distances(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Return the distance of each position of sequences ``(N, T)`` from the subspaces."""
        parts = []
        for chunk in ids.split(max(1, AT_ONCE // ids.shape[1])):
            entering = inputs_of(model, self.modules, chunk)
            parts.append(self.of([entering[name] for name in self.modules]).amax(dim=0))
        return torch.cat(parts)

    def of(self, entering: Sequence[Tensor]) -> Tensor:
        """Return the distance from each subspace of what enters its layer, ``(..., width)``."""
        return torch.stack(
            [span.distance(one) for span, one in zip(self.spans, entering, strict=True)]
        )


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
    grown = Prefixes(model, checked.modules)
    beams = grown.ids
    ended: list[Tensor] = []
    for tokens in given.tokens:
        if not len(tokens) or stop():
            break
        apart = torch.cat([checked.of(one).amax(dim=0) for one in grown.followed_by(tokens)])
        limit = min(given.threshold, separating(apart, len(apart)) or given.threshold)
        keep = (apart < limit).nonzero().flatten()
        keep = keep[apart[keep].argsort()][:MOST_BEAMS]
        continued = set((keep // len(tokens)).tolist())
        ended += [beam for i, beam in enumerate(beams) if i not in continued and len(beam)]
        grown.keep(keep // len(tokens), tokens[keep % len(tokens)])
        beams = grown.ids
        if not len(beams):
            break
    return ended + list(beams)


@torch.no_grad()
def grow(
    model: nn.Module,
    checked: Checked,
    apart: Tensor,
    tokens: Tensor,
    *,
    special: Tensor,
    count: int,
    stop: Callable[[], bool],
) -> list[Tensor]:
    """Return the likeliest sequences of a causal model where no distance separates tokens.

    As `extend`, but prefixes compete by the mean square of their distances instead of passing a
    threshold, after TIGER (2606.18312), whose descent this replaces by a beam.

    Parameters
    ----------
    apart
        ``(len(tokens), T)`` of `local_distances`; zeros where the first layers tell nothing.
    special
        Tokens of which one ends a sequence; without any, all are as long as they can be.
    """
    length = apart.shape[1]
    grown, energy = Prefixes(model, checked.modules), torch.zeros(1)
    beams = grown.ids
    ended: list[tuple[float, Tensor]] = []
    most = min(MOST_BEAMS, max(_FEWEST_BEAMS, _BEAMS_EACH * count))
    tried = min(len(tokens), max(_FEWEST_TRIED, _TRIED_EACH * count))
    if not bool(apart.any()):
        tried = len(tokens)  # nothing ranks them
    for position in range(length):
        if stop() or not len(beams):
            break
        nearest = apart[:, position].topk(tried, largest=False)
        choices = tokens[nearest.indices]
        added = torch.cat(
            [checked.of(one).square().mean(dim=0) for one in grown.followed_by(choices)]
        )
        added = added + nearest.values.square().repeat(len(beams)).to(added)
        totals = energy.repeat_interleave(len(choices)).to(added) + added
        # A prefix has few continuations that count, so that no text crowds out the others.
        each = totals.view(len(beams), -1).topk(min(_CHILDREN, len(choices)), largest=False)
        places = (each.indices + torch.arange(len(beams))[:, None] * len(choices)).flatten()
        places = places[totals[places].argsort()][:most]
        parents, last = places // len(choices), choices[places % len(choices)]
        kept, energy = torch.cat([beams[parents], last[:, None]], dim=1), totals[places]
        over = torch.isin(kept[:, -1], special) if position else torch.zeros(len(kept)).bool()
        over = over | (position == length - 1)
        ended += [
            (float(e) / (position + 1), s) for e, s in zip(energy[over], kept[over], strict=True)
        ]
        grown.keep(parents[~over], last[~over])
        beams, energy = grown.ids, energy[~over]
    if beams.shape[1]:
        ended += list(zip((energy / beams.shape[1]).tolist(), beams, strict=True))
    chosen: list[Tensor] = []
    for _, sequence in sorted(ended, key=lambda one: one[0]):
        if len(chosen) < count and all(_alike(sequence, one) <= _SAME_TEXT for one in chosen):
            chosen.append(sequence)
    return chosen


def _alike(one: Tensor, other: Tensor) -> float:
    """Return the share of positions at which two sequences have the same token."""
    shared = min(len(one), len(other))
    return float((one[:shared] == other[:shared]).sum()) / max(len(one), len(other))
