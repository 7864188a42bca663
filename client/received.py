"""The arrays that an update is taken from: those that the app read, whatever the sender names.

A server chooses names and order of what it sends. An app reads it by one of them, and a mod that
took the other one would subtract what the server chose from what was trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from flwr.app import ArrayRecord

from bract.client.defenses import DefenseError
from bract.errors import BractError, one_line, shown
from bract.protocol.arrays import PACKED
from bract.protocol.reading import Reading
from bract.updates.update import numbered

Reads = Literal["name", "order"]


def checked_reads(reads: object) -> Reads | None:
    """Return how an app is declared to read what it receives; None where nothing is declared."""
    if reads is None or reads in get_args(Reads):
        return reads  # type: ignore[return-value]
    raise BractError(
        f"DefenseMod: reads is {shown(reads)}, expected 'name' or 'order'", code="config-value"
    )


def checked_names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return names as an author gives them.

    Raises
    ------
    BractError
        If they are one text, whose letters would each count as a name, or are no texts.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise BractError(
            f"DefenseMod: {what} is {shown(names)}, expected a list of names, such as ['bn']",
            code="config-value",
        )
    return tuple(names)


def base_of(sent: Mapping[str, ArrayRecord], record: str | None) -> dict[str, ArrayRecord]:
    """Return the one record of arrays that an update is taken from, whatever the app returns.

    Parameters
    ----------
    record
        The key that the app's author names; None where one record alone may be sent.

    Raises
    ------
    DefenseError
        If the sender could choose it, by a name or by a second record.
    """
    if packed := [key for key, arrays in sent.items() if PACKED in arrays]:
        raise DefenseError(
            f"DefenseMod was sent {shown(packed[0])} packed, as bract's own clients are: another "
            "app would read other arrays than the mod; nothing was sent"
        )
    if record is None and len(sent) <= 1:
        return dict(sent)
    if record is not None and record in sent:
        return {record: sent[record]}
    names = one_line(", ".join(list(sent)[:5]), 200)
    found = f"DefenseMod was sent {len(sent)} array records ({names})"
    if record is not None:
        raise DefenseError(f"{found} and expected {record}; nothing was sent")
    raise DefenseError(
        f"{found}, and the server could choose which of them the update is taken from; name "
        "the one that holds the model as the app reads it: DefenseMod(..., record='arrays'); "
        "nothing was sent"
    )


def check_pairs(
    sent: Sequence[str],
    returned: Sequence[str],
    reading: Reading,
    reads: Reads | None,
    keeps: Sequence[str] = (),
) -> None:
    """Refuse a reply whose arrays have one base by their names and another one by their order.

    Parameters
    ----------
    sent, returned
        Names of both records, in their order.
    reads
        How the app reads what it receives, as its author declares; None where both must agree.
    keeps
        Beginnings of the names of arrays that are received and not returned. Others are refused: a
        model may read one of its parameters under several names.

    Raises
    ------
    DefenseError
        If the sender could choose what the update is taken from.
    """
    by_name = reading.matched == "name"
    alike = list(sent) == list(returned)
    ordered = not numbered(sent) or list(sent) == [str(place) for place in range(len(sent))]
    if reads == "name":
        fits = by_name and all(name.startswith(tuple(keeps)) for name in reading.absent)
    elif by_name:
        fits = alike and ordered
    else:
        # Names that are numbers say no more than the order does. An app that returns names of its
        # own may read by them, and not strictly: of a list it then loads nothing.
        lists = numbered(sent) and numbered(returned)
        fits = ordered and len(sent) == len(returned) and (reads == "order" or lists)
    if fits:
        return
    raise DefenseError(
        f"DefenseMod was sent {_listed(sent)} and the app returned {_listed(returned)}: by their "
        "names and by their order the update would be taken from different arrays, so the server "
        "could choose from which; return the model's whole state as it was received, or say how "
        "the app reads what it receives: DefenseMod(..., reads='name') where it looks arrays up "
        "by their names (and keeps=['bn'], of names that begin so and are not returned), "
        "reads='order' where it takes them one after the other; nothing was sent"
    )


Ties = tuple[tuple[str, ...], ...]
"""Groups of names that are one tensor of an app's model each."""


def checked_ties(tied: Sequence[Sequence[str]]) -> Ties:
    """Return the groups of names of one tensor, as an author gives them.

    Raises
    ------
    BractError
        If a group has fewer than two names, or a name is in two.
    """
    groups = tuple(tuple(group) for group in tied if not isinstance(group, str))
    names = [name for group in groups for name in group]
    if len(groups) != len(tied) or any(len(g) < 2 for g in groups) or len(set(names)) < len(names):
        raise BractError(
            f"DefenseMod: tied is {list(tied)!r}, expected groups of two names or more, such as "
            "[['embed.weight', 'head.weight']], and each name in one of them",
            code="config-value",
        )
    return groups


def tie(records: Iterable[ArrayRecord], tied: Ties) -> None:
    """Give all names of a tensor the value of the first one that was received.

    An app keeps one of them, and which one is its own; so whatever was sent under the others, the
    update is taken from what the app read.
    """
    for record in records:
        for group in tied:
            present = [name for name in group if name in record]
            for name in present[1:]:
                record[name] = record[present[0]]


def tied_arrays(reading: Reading, names: Sequence[str], tied: Ties) -> dict[str, str]:
    """Return the arrays that are one tensor under a second name: each later name, and the first.

    Parameters
    ----------
    names
        Of the arrays to protect.

    Raises
    ------
    DefenseError
        If names of one tensor came back with different values, or are paired with different values
        of what was sent: `tie` goes by the sender's names, and an app may read by the order.
    """
    by_key = {reading.keys[name]: name for name in names}
    found: dict[str, str] = {}
    for group in tied:
        present = [by_key[key] for key in group if key in by_key]
        for name in present[1:]:
            if not torch.equal(reading.returned[present[0]], reading.returned[name]):
                raise DefenseError(
                    f"DefenseMod: {present[0]} and {name} are named as tied and came back with "
                    "different values; correct tied=; nothing was sent"
                )
            if not torch.equal(reading.sent[present[0]], reading.sent[name]):
                raise DefenseError(
                    f"DefenseMod: {present[0]} and {name} are named as tied and were received with "
                    "different values under other names, so the server could choose from which the "
                    "update is taken; nothing was sent"
                )
            found[name] = present[0]
    return found


def check_untied(reading: Reading, names: Sequence[str]) -> None:
    """Refuse arrays that came back equal to the bit, and were received with different values.

    So does one tensor under two names. Of two values that were sent for it an app keeps one, and
    the update of the other name would be taken from what its sender chose.

    Raises
    ------
    DefenseError
        If there are any: the author says which names are tied.
    """
    first: dict[object, list[str]] = {}
    for name in names:
        value = reading.returned[name]
        flat = value.reshape(-1)
        sample = flat[:: max(1, len(flat) // 16)].tolist()
        alike = first.setdefault((value.shape, value.dtype, tuple(sample)), [])
        for one in alike:
            if torch.equal(reading.returned[one], value) and not torch.equal(
                reading.sent[one], reading.sent[name]
            ):
                raise DefenseError(
                    f"DefenseMod: {one} and {name} came back equal to the bit, as one tensor "
                    "under two names does, and were received with different values: the server "
                    "could choose from which the update is taken; name them, DefenseMod(..., "
                    f"tied=[[{reading.keys[one]!r}, {reading.keys[name]!r}]]), in the order of "
                    "your choice; nothing was sent"
                )
        alike.append(name)


def _listed(names: Sequence[str]) -> str:
    return one_line(f"{len(names)} arrays ({', '.join(names[:5])}, ...)", 200)
