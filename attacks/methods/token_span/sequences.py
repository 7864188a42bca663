"""Assemble sequences from tokens that a gradient's subspace admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.prefixes import Prefixes
from bract.attacks.methods.token_span.separating import separating
from bract.attacks.methods.token_span.stages import inputs_of
from bract.attacks.problem.site import Site
from bract.attacks.reading.span import Span

AT_ONCE = 32768
"""Tokens in one forward pass, of at least one sequence."""

MOST_BEAMS = 256

CERTAIN = 5.0
"""How many times farther from the subspaces every change of one token must lead."""

_FEWEST_BEAMS, _BEAMS_EACH = 12, 16
"""Prefixes that compete: at least, and for each sequence that is searched."""

_FEWEST_TRIED, _TRIED_EACH, _CHILDREN = 12, 16, 8
"""Tokens tried after each prefix, likewise, and continuations that are kept of it."""

_LAST, _OF_A_KIND = 12, 4
"""Last tokens by which prefixes are of one kind, and how many of a kind are kept."""

_STANDS_OUT = 1.4
"""Ratio of neighbouring distances of a special token from which on the nearer ones are where it
stands. This and the numbers above were chosen on texts that score nothing."""

_NOTHING = 0.05
"""Distance from a subspace below which its own blur hides differences."""

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

    layers: tuple[Site, ...]
    spans: tuple[Span, ...]

    @property
    def modules(self) -> list[str]:
        """Names of the modules, in the order of the layers."""
        return [layer.layer for layer in self.layers]

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
    model: nn.Module, layer: Site, span: Span, tokens: Tensor, length: int
) -> Tensor:
    """Return the distance of each token at each position, ``(len(tokens), length)``."""
    parts = []
    for chunk in tokens.split(max(1, AT_ONCE // length)):
        repeated = chunk[:, None].expand(-1, length).contiguous()
        parts.append(span.distance(inputs_of(model, [layer.layer], repeated)[layer.layer]))
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
    candidates: int | None = None,
) -> list[Tensor]:
    """Return the likeliest sequences of a causal model where no distance separates tokens.

    As `extend`, but prefixes compete by the mean logarithm of their distances instead of passing a
    threshold, after TIGER (2606.18312), whose descent this replaces by a beam. A layer whose
    subspace is blurred more thus counts no more than the others. (Where the first layers tell
    nothing, it is the mean square: other layers are not blurred then.) Of prefixes that are alike
    few are kept, so that a text whose gradient is large crowds out no other one. A special token is
    put only where it stands out.

    Parameters
    ----------
    apart
        ``(len(tokens), T)`` of `local_distances`; zeros where the first layers tell nothing.
    special
        Tokens of which one ends a sequence; without any, all are as long as they can be.
    count
        Texts of the update.
    candidates
        Sequences to return at most, ``count`` by default.
    """
    length, wanted = apart.shape[1], count if candidates is None else candidates
    grown, energy = Prefixes(model, checked.modules), torch.zeros(1)
    beams = grown.ids
    ended: list[tuple[float, Tensor]] = []
    most = min(MOST_BEAMS, max(_FEWEST_BEAMS, _BEAMS_EACH * count))
    tried = min(len(tokens), max(_FEWEST_TRIED, _TRIED_EACH * count))
    ranked = bool(apart.any())
    tried = tried if ranked else len(tokens)
    energy_of = _logarithm if ranked else torch.square
    apart = _special_where_they_stand_out(apart, torch.isin(tokens, special))
    for position in range(length):
        if stop() or not len(beams):
            break
        nearest = apart[:, position].topk(tried, largest=False)
        choices = tokens[nearest.indices]
        added = torch.cat(
            [energy_of(checked.of(one)).mean(dim=0) for one in grown.followed_by(choices)]
        )
        added = added + energy_of(nearest.values).repeat(len(beams)).to(added)
        totals = energy.repeat_interleave(len(choices)).to(added) + added
        # A prefix has few continuations that count, so that no text crowds out the others.
        each = totals.view(len(beams), -1).topk(min(_CHILDREN, len(choices)), largest=False)
        places = (each.indices + torch.arange(len(beams))[:, None] * len(choices)).flatten()
        places = places[totals[places].isfinite()]
        places = places[totals[places].argsort()]
        longer = torch.cat(
            [beams[places // len(choices)], choices[places % len(choices)][:, None]], dim=1
        )
        chosen = _unlike(longer, most)
        places, kept = places[chosen], longer[chosen]
        energy = totals[places]
        over = torch.isin(kept[:, -1], special) if position else torch.zeros(len(kept)).bool()
        over = over | (position == length - 1)
        ended += [
            (float(e) / (position + 1), s) for e, s in zip(energy[over], kept[over], strict=True)
        ]
        grown.keep(places[~over] // len(choices), kept[~over, -1])
        beams, energy = grown.ids, energy[~over]
    if not ended and beams.shape[1]:
        ended = list(zip((energy / beams.shape[1]).tolist(), beams, strict=True))
    ended.sort(key=lambda one: one[0])
    # Where special tokens stand out, they show where texts end, and at each of these places one
    # does.
    lengths = [len(sequence) if bool(apart.isinf().any()) else 0 for _, sequence in ended]
    firsts = [i for i, own in enumerate(lengths) if own not in lengths[:i]]
    order = [*firsts, *(i for i in range(len(ended)) if i not in firsts)]
    found: list[Tensor] = []
    for sequence in (ended[i][1] for i in order):
        if len(found) < wanted and all(_alike(sequence, one) <= _SAME_TEXT for one in found):
            found.append(sequence)
    return found


def _logarithm(distances: Tensor) -> Tensor:
    """Return the logarithm of distances, held above `_NOTHING`; infinite where they are."""
    return distances.clamp_min(_NOTHING).log()


def _special_where_they_stand_out(apart: Tensor, special: Tensor) -> Tensor:
    """Return distances ``(N, T)`` in which special tokens are infinitely far from other places.

    A special token has a large gradient where it stands, so that its distances there are small, and
    fall into two groups. Where they do not, it may be anywhere. The smaller ones are raised to that
    of the nearest other token, which may follow in the place of an end.
    """
    found = apart.clone()
    if bool(special.all()):
        return found
    nearest = apart[~special].amin(dim=0)
    for row in special.nonzero().flatten().tolist():
        ordered = apart[row].sort().values.clamp_min(_NOTHING)
        ratios = ordered[1:] / ordered[:-1]
        widest = int(ratios.argmax())
        if float(ratios[widest]) >= _STANDS_OUT:
            limit = float((ordered[widest] * ordered[widest + 1]).sqrt())
            there = torch.maximum(apart[row], nearest)
            found[row] = torch.where(apart[row] > limit, float("inf"), there)
    return found


def _unlike(sequences: Tensor, most: int) -> Tensor:
    """Return which of sequences ``(N, T)``, the best ones first, are kept: few of each kind, int64.

    Sequences that share most of their last tokens with the best one that is left are of its kind.
    """
    last = sequences[:, -_LAST:]
    left = torch.ones(len(last), dtype=torch.bool)
    kept = torch.zeros(len(last), dtype=torch.bool)
    while bool(left.any()) and int(kept.sum()) < most:
        best = int(left.int().argmax())
        alike = left & ((last == last[best]).double().mean(dim=1) >= _SAME_TEXT)
        kept[alike.nonzero().flatten()[:_OF_A_KIND]] = True
        left &= ~alike
    return kept.nonzero().flatten()[:most]


def _alike(one: Tensor, other: Tensor) -> float:
    """Return the share of positions at which two sequences have the same token."""
    shared = min(len(one), len(other))
    return float((one[:shared] == other[:shared]).sum()) / max(len(one), len(other))
