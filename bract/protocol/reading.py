"""Reading a reply to a train message by an app of its own: for the capture hook and `DefenseMod`.

Records of arrays are paired by their keys and never merged. Tensors are paired by their names, or
by their order where the names differ, as those of ``ArrayRecord([arrays])`` do, which are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from bract.errors import BractError, one_line, shown
from bract.protocol.arrays import view_arrays
from bract.protocol.records import ARRAYS, BUFFER_ENDINGS
from bract.schema.capture import KindSource, Matched, UpdateKind
from bract.updates.update import Tensors, difference, numbered

FEWEST_COMPARED = 100
"""Values from which on a reply's direction shows whether it holds weights."""

FEWEST_OF_TENSOR = 64
"""The same of one matrix."""

_AT_ONCE = 1 << 20
"""Values that are compared at once, which bounds the memory of their copies."""

ALONG, LENGTHS = 0.9, (0.5, 2.0)
"""Cosine with what was sent from which on a matrix of another length has other units than it."""

_FURTHER = 16.0
"""Ratio of squared distances from which on one record is the one that was trained from."""

LEAST_COSINE = 0.3
LEAST_SHARE = 0.5
"""A reply with less of both of what was sent holds no weights.

The cosine of returned and sent weights was 0.94 to 1 in the apps that were measured, that of a
gradient -0.005. Under noise the cosine of weights falls, but ``<returned, sent> / <sent, sent>``
stays about 1.
"""


@dataclass(frozen=True)
class Reading:
    """One reply, as it answers one train message. Names are the model's, where one side has them.

    Attributes
    ----------
    record
        Key of the reply's record that was taken.
    sent, returned
        The tensors that both sides hold, by the same names, in the reply's order.
    sources, keys
        The name under which each of them was sent, and the reply's own.
    absent, extra
        Tensors that were sent and not returned, and the reverse.
    kind, source, cosine
        What the reply holds, how that is known, and the cosine of all floating values returned with
        those sent; None where it was not computed.
    matched
        Whether tensors were paired by name or by order.
    unlike
        Matrices whose values have nothing of those sent: the client may train them from a start of
        its own, such as its last upload.
    left_out
        Keys of the reply's other records of arrays.
    """

    record: str
    sent: Tensors
    returned: Tensors
    sources: Mapping[str, str]
    keys: Mapping[str, str]
    absent: Tensors
    extra: Tensors
    kind: UpdateKind
    source: KindSource
    cosine: float | None
    matched: Matched
    unlike: tuple[str, ...]
    left_out: tuple[str, ...]

    def update(self, names: Collection[str]) -> Tensors:
        """Return the update of some parameters (`bract.updates.update`), as new tensors."""
        if self.kind == "weights":
            return difference({n: self.sent[n] for n in names}, self.returned)
        sign = 1 if self.kind == "gradient" else -1
        return {name: sign * self.returned[name] for name in names}

    def returning(self, update: Mapping[str, Tensor]) -> Tensors:
        """Return what a reply of this kind holds where its update is another one."""
        if self.kind == "weights":
            return {name: self.sent[name] - value for name, value in update.items()}
        sign = 1 if self.kind == "gradient" else -1
        return {name: sign * value for name, value in update.items()}


def checked_kind(owner: str, update: object) -> UpdateKind | None:
    """Return a declared kind of reply; None where none is declared."""
    if update is None or update in get_args(UpdateKind):
        return update  # type: ignore[return-value]
    raise BractError(
        f"{owner}: update is {shown(update)}, expected 'weights', 'delta' (trained minus received "
        "weights) or 'gradient'",
        code="config-value",
    )


def read(
    sent: Mapping[str, ArrayRecord],
    content: RecordDict,
    *,
    update: UpdateKind | None = None,
    preferred: str | None = None,
    compare: bool = True,
) -> Reading:
    """Pair a reply's tensors with those that were sent.

    Parameters
    ----------
    sent
        The train message's records of arrays.
    content
        The reply's content.
    update
        What the app's replies are declared to hold; None: what the values show.
    preferred
        Key of the record that holds the model, where several were sent and returned.
    compare
        False takes undeclared replies for weights: noise covers their direction.

    Raises
    ------
    BractError
        If no record of the reply answers one that was sent, or it holds no weights and nothing else
        is declared.
    """
    received = {key: view_arrays(record) for key, record in sent.items()}
    came = {key: view_arrays(record) for key, record in content.array_records.items()}
    record, first, pair = _paired(received, came, preferred)
    before, after = received[first], came[record]
    matched_sent = {name: before[a] for name, (a, _) in pair.names.items()}
    returned = {name: after[b] for name, (_, b) in pair.names.items()}
    _check_kinds(matched_sent, returned)
    taken = {a for a, _ in pair.names.values()}, {b for _, b in pair.names.values()}
    products = _products(matched_sent, returned)
    kind, source, cosine = _kind(products, update, compare=compare)
    unlike = tuple(
        name
        for name, product in products.items()
        if product.unlike and product.values >= FEWEST_OF_TENSOR and returned[name].dim() > 1
    )
    return Reading(
        record=record,
        sent=matched_sent,
        returned=returned,
        sources={name: a for name, (a, _) in pair.names.items()},
        keys={name: b for name, (_, b) in pair.names.items()},
        absent={name: value for name, value in before.items() if name not in taken[0]},
        extra={name: value for name, value in after.items() if name not in taken[1]},
        kind=kind,
        source=source,
        cosine=cosine,
        matched=pair.matched,
        unlike=unlike if compare and kind == "weights" else (),
        left_out=tuple(key for key in came if key != record),
    )


def buffers_of(reading: Reading, known: Collection[str] = ()) -> set[str]:
    """Return the names of a reading that are no parameters.

    Those are PyTorch's running statistics, integers, those that an average turned into floating
    numbers on one side, and those known from other messages of the run.
    """
    return {
        name
        for name, value in reading.returned.items()
        if name in known
        or name.endswith(BUFFER_ENDINGS)
        or not (value.is_floating_point() and reading.sent[name].is_floating_point())
    }


def possible_statistics(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the arrays of a list that may be running statistics of a normalisation.

    Those are two arrays of one dimension and size behind each other, a mean and a variance. Where a
    number follows them, as a counter of batches does, they are those before it.
    """
    names = list(tensors)
    pairs = [
        (one, other, third)
        for one, other, third in zip(names, names[1:], [*names[2:], None], strict=False)
        if tensors[one].dim() == 1 and tensors[one].shape == tensors[other].shape
    ]
    counted = [p for p in pairs if p[2] is not None and tensors[p[2]].dim() == 0]
    return list(dict.fromkeys(name for pair in counted or pairs for name in pair[:2]))


@dataclass(frozen=True)
class _Pair:
    """Two records that fit: by the model's name, the names on both sides."""

    names: Mapping[str, tuple[str, str]]
    matched: Matched
    left: int


def _paired(
    sent: Mapping[str, Tensors], came: Mapping[str, Tensors], preferred: str | None
) -> tuple[str, str, _Pair]:
    """Return the keys of the two records that hold the model, and how their tensors pair."""
    if not any(came.values()):
        raise BractError("it holds no arrays", code="update-refused")
    held = {name: value for record in came.values() for name, value in record.items()}
    if not any(value.is_floating_point() for value in held.values()):
        shown_arrays = [f"{name} ({described(value)})" for name, value in held.items()]
        raise BractError(
            f"it holds no floating arrays but {_listed(shown_arrays)}: an audit reads updates of "
            "PyTorch models",
            code="update-refused",
        )
    found = {
        (key, first): pair
        for key, after in came.items()
        for first, before in sent.items()
        if (pair := _pair(before, after)) is not None
    }
    if not found:
        raise _unpaired(sent, came)

    def rank(keys: tuple[str, str]) -> tuple[bool, ...]:
        pair = found[keys]
        named = keys[0] == keys[1]
        return (
            named,
            named and keys[0] == preferred,
            named and keys[0] == ARRAYS,
            ARRAYS in keys,
            pair.left == 0,
            pair.matched == "name",
        )

    best = max(found, key=rank)
    tied = [keys for keys in found if keys[0] == best[0] and rank(keys) == rank(best)]
    if tied[1:] and best[0] != best[1]:
        pairs = {first: found[key, first] for key, first in tied}
        best = (best[0], _nearest(sent, came[best[0]], pairs))
    return *best, found[best]


def _nearest(sent: Mapping[str, Tensors], after: Tensors, pairs: Mapping[str, _Pair]) -> str:
    """Return the one of several records sent that a reply of another key was trained from.

    As where each cluster of clients has a model of its own. Training moves weights by little beside
    what models apart differ by.

    Raises
    ------
    BractError
        If no record is far nearer than all others.
    """

    def apart(first: str) -> float:
        names = pairs[first].names.values()
        both = [(sent[first][a], after[b]) for a, b in names if after[b].is_floating_point()]
        return sum(float((x.double() - y.double()).square().sum()) for x, y in both)

    far = {first: apart(first) for first in pairs}
    nearest, second, *_ = sorted(far, key=lambda first: far[first])
    # Equal records are one model.
    if far[nearest] < far[second] and not far[nearest] * _FURTHER < far[second]:
        raise BractError(
            f"nothing shows from which of {_listed(list(pairs))} it was trained: reply under the "
            "key of that record",
            code="update-refused",
        )
    return nearest


def _pair(before: Tensors, after: Tensors) -> _Pair | None:
    """Pair two records' tensors; None where their shapes say that they are different things."""
    common = [name for name in after if name in before]
    lists = numbered(before) and numbered(after)
    if common and not (lists and len(before) != len(after)):
        fits = all(before[name].shape == after[name].shape for name in common)
        if not fits or not any(after[name].is_floating_point() for name in common):
            return None
        left = len(before) + len(after) - 2 * len(common)
        return _Pair({name: (name, name) for name in common}, "name", left)
    if common or len(before) != len(after):
        return None
    both = list(zip(before, after, strict=True))
    if any(before[one].shape != after[other].shape for one, other in both):
        return None
    if not any(value.is_floating_point() for value in after.values()):
        return None
    own = numbered(after) and not numbered(before)
    return _Pair({(a if own else b): (a, b) for a, b in both}, "order", 0)


def _unpaired(sent: Mapping[str, Tensors], came: Mapping[str, Tensors]) -> BractError:
    """Return why no record of a reply answers one that was sent: names first, then shapes."""
    record = next((key for key in came if key in sent), next(key for key in came if came[key]))
    after = came[record]
    before = sent.get(record) or next(iter(sent.values()), {})
    for name, value in after.items():
        if name in before and before[name].shape != value.shape:
            return BractError(
                f"{one_line(name, 100)} was received as {described(before[name])} and returned as "
                f"{described(value)}",
                code="update-refused",
            )
    return BractError(
        f"its arrays {one_line(repr(record), 100)} are not those that were sent: sent were "
        f"{_listed(list(before))}, returned {_listed(list(after))}; reply with "
        "ArrayRecord(model.state_dict())",
        code="update-refused",
    )


@dataclass(frozen=True)
class _Products:
    """Inner products of the values sent with themselves and those returned, and of the latter."""

    values: int = 0
    own: float = 0.0
    both: float = 0.0
    other: float = 0.0

    def __add__(self, more: _Products) -> _Products:
        return _Products(
            self.values + more.values,
            self.own + more.own,
            self.both + more.both,
            self.other + more.other,
        )

    @property
    def known(self) -> bool:
        """Return whether the values have a direction to compare."""
        return self.own > 0 and math.isfinite(self.own + self.both + self.other)

    @property
    def cosine(self) -> float:
        return self.both / math.sqrt(self.own * self.other) if self.other else 0.0

    @property
    def rescaled(self) -> bool:
        """Return whether the values are those sent in other units, so far as they show."""
        if not self.known or self.values < FEWEST_OF_TENSOR or self.cosine < ALONG:
            return False
        return not LENGTHS[0] <= self.both / self.own <= LENGTHS[1]

    @property
    def unlike(self) -> bool:
        return self.known and self.cosine < LEAST_COSINE and self.both / self.own < LEAST_SHARE


def _products(sent: Tensors, returned: Tensors) -> dict[str, _Products]:
    """Return the inner products of every floating tensor but running statistics."""
    found = {}
    for name, value in returned.items():
        if not (value.is_floating_point() and sent[name].is_floating_point()):
            continue
        if name.endswith(BUFFER_ENDINGS):
            continue
        total = _Products()
        parts = (x.reshape(-1).split(_AT_ONCE) for x in (sent[name], value))
        for a, b in zip(*parts, strict=True):
            one, other = a.double(), b.double()
            total += _Products(len(one), float(one @ one), float(one @ other), float(other @ other))
        found[name] = total
    return found


def _kind(
    products: Mapping[str, _Products], declared: UpdateKind | None, *, compare: bool
) -> tuple[UpdateKind, KindSource, float | None]:
    total = sum(products.values(), _Products())
    cosine = round(total.cosine, 4) if total.known else None
    if declared is not None:
        return declared, "declared", cosine
    if not total.known or not compare or total.values < FEWEST_COMPARED:
        return "weights", "assumed", cosine
    if total.unlike:
        raise BractError(
            f"it holds no weights: its cosine with what was sent is {total.cosine:.2f}, for "
            "weights it is near 1; declare update='gradient', or update='delta' for trained minus "
            "received weights, or update='weights' where training diverged or began elsewhere",
            code="update-refused",
        )
    _check_length(products)
    return "weights", "inferred", cosine


def _check_kinds(sent: Tensors, returned: Tensors) -> None:
    """Refuse what is no real number: complex parameters, and codes of a quantisation.

    Whole numbers are buffers, such as ids of positions, which an average may have turned into
    floating ones; a matrix of other floating numbers is none.
    """
    for name, value in returned.items():
        before, shown = sent[name], one_line(name, 100)
        if value.is_complex() or before.is_complex():
            raise BractError(
                f"{shown} is {described(value if value.is_complex() else before)}: complex "
                "parameters are not handled; hold them as real ones (torch.view_as_real)",
                code="update-refused",
            )
        coded = before.is_floating_point() and not value.is_floating_point() and value.dim() > 1
        if coded and not torch.equal(before, before.round()):
            raise BractError(
                f"{shown} was sent as {described(before)} and returned as {described(value)}: "
                "codes of a quantisation are no weights; return what they stand for",
                code="update-refused",
            )


def _check_length(products: Mapping[str, _Products]) -> None:
    """Refuse weights that are most of all multiples of what was sent."""
    whole = sum(one.values for one in products.values())
    other = [one for one in products.values() if one.rescaled]
    if 2 * sum(one.values for one in other) <= whole:
        return
    largest = max(other, key=lambda one: one.values)
    raise BractError(
        f"its weights are {largest.both / largest.own:.3g} times those that were sent, as "
        "multiplied by a number of examples, or codes of a quantisation: return weights as they "
        "were trained, or declare update='weights' where training made them so",
        code="update-refused",
    )


def described(value: Tensor) -> str:
    """Return a tensor's dtype and shape, for messages."""
    return f"{value.dtype} {tuple(value.shape)}"


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > 5 else ""
    return one_line(", ".join(names[:5]), 200) + more
