"""Look for another description that explains a client's update on what it kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bract.audit.description.alternatives import NEAR, Alternative, Search, explains
from bract.audit.description.search_time import OutOfTimeError, SearchTime
from bract.audit.description.truth_check import REPLAYED_STEPS, Repeated

BATCHES = (32, 16, 8, 4, 64, 10, 20, 2, 1, 128)
"""Usual sizes of a batch."""

SECONDS = 8.0
"""Processor time after which no other description of one upload is begun."""

EXACTLY = 1e-7
"""Distance from a cosine of 1 below which nothing is left for another description to explain."""


_BATCHES = "other sizes of a batch"

_KINDS: tuple[tuple[str, Callable[[Search], Iterator[Alternative]]], ...] = (
    ("other learning rates", Search.other_rates),
    ("other optimizers", Search.other_optimizers),
    ("another mode or normalisation", Search.other_contexts),
    ("weight decay, a proximal term or momentum", Search.other_terms),
    ("label smoothing, class weights or clipping", Search.other_losses),
)
"""Kinds of other descriptions with their names, in the order in which they are tried."""


def explaining(
    made: Repeated, guessed: Collection[str] = (), clock: SearchTime | None = None
) -> list[Alternative]:
    """Return other descriptions that explain the update, the nearest first.

    Parameters
    ----------
    guessed
        Fields of the declaration that nothing declares: other sizes of a batch are tried for one
        that is guessed, where nothing else explains.
    clock
        Notes what is not tried for want of time.
    """
    clock = clock or SearchTime()
    end = time.thread_time() + SECONDS
    open_batch = "batch_size" in guessed and not made.case.observation.declaration.defenses
    near = made.compared[0] >= NEAR
    found: list[Alternative] = []
    left = [name for name, _ in _KINDS]
    if open_batch:
        left = [_BATCHES, *left]
    try:
        if open_batch and made.compared[0] < 1.0 - EXACTLY:
            # A guessed size of a batch is the usual fault, and quickly tried. Short steps lead
            # nearly in the same direction whatever their batches: then one that is exact counts.
            for one in _other_batches(made, [], clock):
                exact = 1.0 - one.cosine < EXACTLY
                if explains(one.cosine, one.scale) and (exact or not near):
                    return [one]
                if time.thread_time() > end - SECONDS / 2:
                    clock.miss([_BATCHES])
                    break
            if "lr" not in guessed:
                left.remove(_BATCHES)
        search = Search(made, clock)
        for name, kind in _KINDS:
            for one in kind(search):
                if explains(one.cosine, one.scale):
                    found.append(one)
                    if 1.0 - one.cosine < EXACTLY:
                        return found
                # Of the right direction the rate that fits comes next.
                if time.thread_time() > end and one.cosine < NEAR:
                    raise OutOfTimeError
            left.remove(name)
        if found or not open_batch or "lr" not in guessed:
            return found
        for one in _other_batches(made, ["lr"], clock):
            if explains(one.cosine, one.scale):
                return [one]
            if time.thread_time() > end:
                raise OutOfTimeError
    except OutOfTimeError:
        clock.miss(left)
    return found


def _other_batches(
    made: Repeated, fitted: Sequence[str], clock: SearchTime
) -> Iterator[Alternative]:
    """Yield descriptions of one pass over the examples in other batches."""
    observation, count = made.case.observation, len(made.images)
    p = observation.declaration
    if not made.case.law.averaging or not p.lr:
        return
    for size in BATCHES:
        steps = -(-count // size)
        if size > count or size == p.batch_size or not 1 < steps <= REPLAYED_STEPS:
            continue
        cut: dict[str, Any] = {"batch_size": size, "local_steps": steps}
        there = replace(observation, declaration=replace(p, **cut))
        case = replace(made.case, observation=there)
        search = Search(replace(made, case=case, steps=steps), clock)
        for words, changes in (("", {}), *search.kinds()):
            named = f"batches of {size}" + (f" with {words}" if words else "")
            if not fitted:
                one = search.tried(named, cut | changes)
                yield from () if one is None else (one,)
            else:
                yield from search.with_rate(named, cut | changes)
