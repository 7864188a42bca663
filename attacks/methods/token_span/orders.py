"""Put the tokens of an encoder's texts in order, by the subspaces of later layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.bags import Bag
from bract.attacks.methods.token_span.sequences import CERTAIN, Candidates, Checked

_ATTEMPTS, _FROM_BAGS = 60, 3
"""Starts for each text at most, and how many of them are among its bag's tokens alone."""

_THRESHOLD = 0.01
"""Distance from later layers' subspaces below which a text is there, where the first layers'
separate nothing."""

_LENGTHS = 4
"""Lengths that are tried for a text of which tokens are placed."""

_SWEEPS = 6
"""Most passes over the positions of a sequence from one start."""


@dataclass(frozen=True)
class Ordered:
    """Texts in the order of their bags' certainty.

    Attributes
    ----------
    texts
        Token ids of each, int64.
    certain
        How many of the first are right, as far as the subspaces tell.
    """

    texts: list[Tensor]
    certain: int


@torch.no_grad()
def assemble(
    model: nn.Module,
    checked: Checked,
    given: Candidates | None,
    bags: Sequence[Bag],
    *,
    ends: Tensor,
    special: Tensor,
    padding: int,
    generator: torch.Generator,
    stop: Callable[[], bool],
    places: Mapping[int, int] | None = None,
    relaxed: Callable[[Candidates, Mapping[int, int]], Tensor] | None = None,
    enough: bool = False,
) -> Ordered:
    """Return the texts of bags in order, certain ones first, for a model that is not causal.

    From the bag's tokens in any order, one position after the other takes the token that brings
    all inputs of the contextual layers nearest to their subspaces, until nothing changes. A
    sequence counts as found where every change of one token would lead much farther away; others
    are tried again from other orders, then among all tokens, while there is time. What is placed
    starts there, and positions that are not known start as padding, which other tokens do not see.

    Parameters
    ----------
    given
        Tokens that the first layers admit at each position; None where they admit all.
    ends
        Lengths that a sequence can have, int64; empty where any is possible.
    special
        Tokens that begin or end a text.
    places
        Position of each token that is at a single one.
    relaxed
        Makes the start from what is allowed and placed at every second pair of attempts; None for
        none.
    enough
        Whether to return once some texts are certain and all have been tried.
    """
    found: dict[int, tuple[float, Tensor]] = {}
    certain: set[int] = set()
    texts: set[tuple[int, ...]] = set()
    for attempt in range(_ATTEMPTS):
        for number, bag in enumerate(bags):
            if number in certain or stop():
                continue
            if bag.placed:
                allowed = _allowed_beside(bag, given, places or {}, ends, special, attempt)
            else:
                allowed = _allowed(bag, given, ends, special, attempt)
            if not allowed.tokens:
                continue
            start = _start(allowed, special, bag.placed, padding, generator)
            if relaxed is not None and attempt % 4 in (2, 3):
                start = relaxed(allowed, bag.placed)
            elif attempt < 2 and bag.placed:
                start = _unknown(start, bag.placed, padding)
            sequence, apart, margin = _settle(model, checked, allowed, start, padding, stop)
            key = tuple(sequence.tolist())
            if key in texts:
                continue
            if number not in found or apart < found[number][0]:
                found[number] = apart, sequence
            if margin >= CERTAIN and apart < allowed.threshold:
                certain.add(number)
                texts.add(key)
        if enough and certain:
            break
    order = sorted(range(len(bags)), key=lambda i: (i not in certain, found.get(i, (1.0,))[0]))
    ordered = [
        found[i][1]
        if i in certain or (i in found and bags[i].placed)
        else with_all(found[i][1] if i in found else special[:0], bags[i].tokens, special)
        for i in order
    ]
    return Ordered(ordered, len(certain))


def with_all(sequence: Tensor, tokens: Tensor, special: Tensor) -> Tensor:
    """Return a sequence in which tokens that lack take the places of superfluous ones, or follow.

    Parameters
    ----------
    tokens
        The tokens of the text as often as it has them, special ones left out.
    """
    left, known = Counter(tokens.tolist()), set(special.tolist())
    lacking = list((left - Counter(sequence.tolist())).elements())
    found: list[int] = []
    for token in sequence.tolist():
        if token in known or left[token] > 0 or not lacking:
            left[token] -= 1
            found.append(token)
        else:
            found.append(lacking.pop())
    return torch.tensor(found + lacking, dtype=torch.int64)


def at_places(
    given: Candidates | None, tokens: Tensor, places: Mapping[int, int], length: int
) -> Candidates | None:
    """Return candidates among which tokens with a known position are nowhere else."""
    if not places:
        return given
    if given is None:
        given = Candidates((tokens,) * length, _THRESHOLD)
    return Candidates(
        tuple(
            torch.tensor([t for t in at.tolist() if places.get(t, position) == position]).long()
            for position, at in enumerate(given.tokens)
        ),
        given.threshold,
    )


def _allowed(
    bag: Bag, given: Candidates | None, ends: Tensor, special: Tensor, attempt: int
) -> Candidates:
    """Return the bag's tokens that may be at each position of its text."""
    length = bag.length
    if len(ends):
        nearest = ends[(ends - length).abs().argsort(stable=True)]
        length = int(nearest[attempt % (2 if attempt < _FROM_BAGS else len(ends)) % len(ends)])
    own = torch.cat([bag.tokens.unique(), special])
    if given is None:
        return Candidates((own,) * length, _THRESHOLD)
    found = []
    for tokens in given.tokens[:length]:
        mine = tokens[torch.isin(tokens, own)]
        found.append(mine if len(mine) and attempt < _FROM_BAGS else tokens)
    return Candidates(tuple(found), given.threshold)


def _allowed_beside(
    bag: Bag,
    given: Candidates | None,
    places: Mapping[int, int],
    ends: Tensor,
    special: Tensor,
    attempt: int,
) -> Candidates:
    """Return the tokens that may be at each position of a text some of whose tokens are placed.

    By turns those that are known there, else those of the bag, and all that are admitted there.
    """
    least = max(bag.placed) + 1
    lengths = ends[ends >= least] if len(ends) else torch.tensor([bag.length])
    if not len(lengths):
        lengths = torch.tensor([least])
    nearest = lengths[(lengths - bag.length).abs().argsort(stable=True)]
    length = int(nearest[attempt // 2 % min(len(nearest), _LENGTHS)])
    own = set(bag.tokens.tolist()) | set(special.tolist())
    found = []
    for position in range(length):
        admitted = given.tokens[position].tolist() if given is not None else sorted(own)
        here = [token for token in admitted if places.get(token) == position]
        mine = [token for token in admitted if token in own and token not in here]
        near = here if position in bag.placed else here + mine
        found.append(torch.tensor(admitted if attempt % 2 or not near else near))
    return Candidates(tuple(found), _THRESHOLD if given is None else given.threshold)


def _unknown(start: Tensor, placed: Mapping[int, int], padding: int) -> Tensor:
    """Return a start with padding where nothing is placed."""
    found = torch.full_like(start, padding)
    places = torch.tensor(list(placed))
    found[places] = start[places]
    return found


def _start(
    allowed: Candidates,
    special: Tensor,
    placed: Mapping[int, int],
    padding: int,
    generator: torch.Generator,
) -> Tensor:
    """Return what is placed; else draw, special tokens only at the end or where nothing else is.

    A position without candidates is padding inside a text.
    """
    chosen = []
    for position, tokens in enumerate(allowed.tokens):
        if position in placed:
            chosen.append(torch.tensor(placed[position]))
            continue
        ending = torch.isin(tokens, special)
        last = position == len(allowed.tokens) - 1
        wanted = tokens[ending if last and bool(ending.any()) else ~ending]
        pool = wanted if len(wanted) else tokens
        pool = pool if len(pool) else torch.tensor([padding])
        chosen.append(pool[torch.randint(len(pool), (1,), generator=generator)][0])
    return torch.stack(chosen)


def _settle(
    model: nn.Module,
    checked: Checked,
    given: Candidates,
    sequence: Tensor,
    padding: int,
    stop: Callable[[], bool],
) -> tuple[Tensor, float, float]:
    """Return where a descent ends, its distance, and how many times farther one change leads."""
    apart, margin = 1.0, float("inf")
    for _ in range(_SWEEPS):
        before, margin = sequence.clone(), float("inf")
        for position in range(len(sequence)):
            tokens = given.tokens[position]
            single = len(tokens) < 2 and bool(sequence[position] != padding)
            if not len(tokens) or single or stop():
                continue
            trials = sequence.repeat(len(tokens), 1)
            trials[:, position] = tokens
            known = trials != padding
            distances = checked.distances(model, trials) * known
            means = distances.sum(dim=1) / known.sum(dim=1).clamp_min(1)
            best = int(means.argmin())
            sequence, apart = trials[best], float(distances[best].amax())
            if len(tokens) < 2:
                continue
            others = means[torch.arange(len(means)) != best]
            margin = min(margin, float(others.min() / means[best].clamp_min(1e-12)))
        if bool((sequence == before).all()):
            break
    if apart == 1.0 and not bool((sequence == padding).any()):
        apart = float(checked.distances(model, sequence[None]).amax())
    return sequence, apart, margin
