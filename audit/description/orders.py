"""Judge an update whose later passes are in an unknown order.

A client that goes through its examples several times shuffles them anew, in an order that no upload
shows. Its update is then one draw among those of all orders. Simulations in a few random orders are
others, and as far from it as they are from each other, if the description is right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from bract.attacks.problem.dropout import read_dropout
from bract.attacks.problem.epoch_orders import steps_per_epoch
from bract.audit.description.alternatives import SCALE, Alternative, Search, explains, rounded
from bract.audit.description.search_time import OutOfTimeError, SearchTime
from bract.audit.description.truth_check import REPLAYED_STEPS, Repeated, compare
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError
from bract.updates.update import Tensors

ORDERS = 5
"""Orders that are simulated."""

WITHIN = 2.0
"""Ratio of mean squared distances, from the update to the simulations and among these, up to which
the update is one of them. Of right descriptions it is 1 in the mean."""

ALIKE = 0.95
"""Cosine with the mean of the simulations from which on an update that is one of them is explained:
where orders move it further, other descriptions fit as well."""

BEYOND = 6.0
"""Ratio from which on no order explains the update."""

EPOCHS = (2, 3, 5, 10)
"""Numbers of passes that are tried where nothing declares one."""

RATES = 3
"""Corrections of a learning rate by the length of the simulated updates."""


@dataclass(frozen=True)
class Spread:
    """Simulated updates in several orders, beside the captured one.

    Attributes
    ----------
    ratio
        Of the mean squared distances, at least 0; what rounding and one percent of the length
        explain is taken off.
    cosine, scale
        Of the captured update with the mean of the simulated ones.
    """

    ratio: float
    cosine: float
    scale: float | None

    @property
    def is_within(self) -> bool:
        """Return whether the update is one of the simulations, and these are alike."""
        return self.ratio <= WITHIN and self.cosine >= ALIKE

    @property
    def is_beyond(self) -> bool:
        """Return whether no order explains the update."""
        return self.ratio > BEYOND


def spread_of(made: Repeated) -> Spread | None:
    """Repeat the client in several orders of its later passes.

    Returns
    -------
    Spread or None
        None where something else than the order is unknown: dropout, augmented inputs, examples
        beyond those that were kept, or a defense.
    """
    orders = _orders(made)
    return None if orders is None else _spread(Search(made), orders, {})


def explaining_orders(made: Repeated, clock: SearchTime) -> Iterator[Alternative]:
    """Yield other learning rates and optimizers that explain an update in some order."""
    orders = _orders(made)
    if orders is not None and made.case.observation.declaration.lr:
        yield from _fitting(Search(made, clock), orders)


def explaining_epochs(made: Repeated, end: float, clock: SearchTime) -> Iterator[Alternative]:
    """Yield other numbers of passes that explain an update which one pass does not.

    Parameters
    ----------
    end
        Processor time of the thread after which no other number is begun.
    clock
        Notes what is not tried for want of time.
    """
    observation, count = made.case.observation, len(made.images)
    p = observation.declaration
    size = min(p.batch_size or count, count)
    if made.steps != steps_per_epoch(count, size) or not p.lr:
        return
    for epochs in EPOCHS:
        steps = epochs * made.steps
        if steps > REPLAYED_STEPS:
            return
        if time.thread_time() > end:
            clock.miss(["other numbers of local epochs"])
            return
        there = replace(observation, declaration=replace(p, local_steps=steps))
        again = replace(made, case=replace(made.case, observation=there), steps=steps)
        search, orders = Search(again, clock), _orders(again)
        if orders is None and size < count:
            return  # something else than the order is unknown
        try:
            if orders is None:
                found = [one for one in search.with_rate("", {}) if explains(one.cosine, one.scale)]
                one = search.tried("", {})
                found += [one] if one is not None and explains(one.cosine, one.scale) else []
            else:
                found = list(_fitting(search, orders, described=True))
        except OutOfTimeError:
            clock.miss(["other numbers of local epochs"])
            return
        for one in found:
            words = f"{epochs} local epochs" + (f" with {one.words}" if one.words else "")
            yield replace(one, words=words, changes=one.changes | {"local_epochs": epochs})


def _fitting(search: Search, orders: Tensor, *, described: bool = False) -> Iterator[Alternative]:
    """Yield learning rates and optimizers that fit; ``described``: also those of the search."""
    lr = search.p.lr or 1.0
    try:
        for words, changes in (("", {}), *search.kinds()):
            rate, found = lr, None
            for _ in range(RATES):
                found = _spread(search, orders, changes | {"lr": rate})
                if found is None or not found.scale or found.scale <= 0.0 or found.is_within:
                    break
                rate *= found.scale
            if found is None or not found.is_within or (not words and rate == lr and not described):
                continue
            given = changes if rate == lr else changes | {"lr": rounded(rate)}
            named = words if rate == lr else f"{words} with lr of about {rate:.2g}"
            yield Alternative(named.removeprefix(" with "), given, found.cosine, found.scale)
    except OutOfTimeError:
        assert search.clock is not None
        search.clock.miss(["other learning rates and optimizers in other orders of later passes"])


def _orders(made: Repeated) -> Tensor | None:
    """Return int64 ``(ORDERS, epochs, N)``, the first pass as it was kept; None as `spread_of`."""
    case, count = made.case, len(made.images)
    p = case.observation.declaration
    size = min(p.batch_size or count, count)
    if p.defenses or p.augmentation or p.num_examples not in (None, count) or not made.plain:
        return None
    epochs = math.ceil(made.steps / steps_per_epoch(count, size))
    if epochs < 2 or size >= count:
        return None
    if not read_dropout(case.observation, case.target_model).readable:
        return None
    drawn = torch.Generator().manual_seed(0)
    found = [[torch.arange(count)] for _ in range(ORDERS)]
    for passes in found:
        passes += [torch.randperm(count, generator=drawn) for _ in range(epochs - 1)]
    return torch.stack([torch.stack(passes) for passes in found])


def _spread(search: Search, orders: Tensor, changes: dict[str, Any]) -> Spread | None:
    p: ClientDeclaration = replace(search.p, **changes)
    if search.clock is not None:
        search.clock.tell(", ".join(f"{key} {value}" for key, value in changes.items()))
    try:
        simulated = [search.simulate(p, order=order) for order in orders]
    except (BractError, RuntimeError, ValueError):
        return None
    among = _mean(_apart(one, other) for one, other in combinations(simulated, 2))
    beyond = _mean(_apart(one, search.sent) for one in simulated)
    whole = sum(float(v.square().sum()) for v in search.sent.values())
    middle = {n: torch.stack([one[n] for one in simulated]).mean(dim=0) for n in simulated[0]}
    cosine, scale = compare(middle, search.sent, None)
    allowed = SCALE**2 * whole
    ratio = max(beyond - allowed, 0.0) / max(among, 1e-300)
    return Spread(ratio, cosine, scale)


def _apart(one: Tensors, other: Tensors) -> float:
    return sum(float((value - other[name]).square().sum()) for name, value in one.items())


def _mean(values: Iterator[float]) -> float:
    found: Sequence[float] = list(values)
    return sum(found) / len(found)
