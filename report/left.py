"""What left the sites, one row a kind of thing, from the hook's list or from what captures name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bract.disk.files import readable_size
from bract.errors import listed
from bract.report.order import natural
from bract.report.read import RunFiles
from bract.report.words.formatting import plural
from bract.report.words.left import FEW
from bract.report.words.provenance import ranges
from bract.schema import ObservationFile
from bract.schema.account import LeftFacts, LeftRow, SmallestCount
from bract.schema.left import LeftReply, LeftThing

MOST_ROWS = 500

MODEL = "model"
"""Kind of the row of a record of model arrays."""

Key = tuple[str, str, str, str]
"""Message, record, name with ``#`` for numbers, kind."""

_WHAT = {"int": "whole number", "float": "number", "bool": "switch"}


@dataclass
class _Row:
    """What is gathered of one kind of thing."""

    amounts: set[str] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)
    replies: int = 0
    names: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    flagged: set[str] = field(default_factory=set)
    labels: bool = False
    came: set[str] = field(default_factory=set)

    def row(self, key: Key) -> LeftRow:
        message, record, name, kind = key
        several = len(self.names) if "#" in name else 0
        amount = _range(self.amounts)
        return LeftRow(
            message=message,
            record=record,
            name=name,
            kind=kind,
            amount=f"{several} times {amount}" if several > 1 else amount,
            clients=len(self.clients),
            replies=self.replies,
            rounds=ranges(self.rounds),
            reasons=list(self.reasons.values()),
            rules=list(self.reasons),
            flagged=sorted(self.flagged, key=natural),
            labels=self.labels,
            policy=_policy(self.came),
        )


def left_facts(files: RunFiles) -> LeftFacts:
    """Return what left the sites; of captures of earlier versions, what these name."""
    if files.left:
        rows = _gathered(_of_replies(files.left))
        return LeftFacts(
            recorded="all" if _covers(files.left, files.captures) else "training",
            rows=rows[:MOST_ROWS],
            replies=len(files.left),
            clients=len({reply.node_id for reply in files.left}),
            unlisted=sum(reply.unlisted for reply in files.left) + len(rows[MOST_ROWS:]),
            smallest=smallest_count(files),
        )
    if not files.captures:
        return LeftFacts()
    return LeftFacts(
        recorded="training",
        rows=_gathered(_of_captures(files.captures))[:MOST_ROWS],
        replies=len(files.captures),
        clients=len({capture.client for capture in files.captures}),
        smallest=smallest_count(files),
    )


SMALL_COUNT = "small-count"
"""The rule of disclosure that flags counts of few people or examples."""

NUM_EXAMPLES = "num-examples"
"""The metric by which Flower weighs a reply: how many examples a client trained on."""


def smallest_count(files: RunFiles) -> SmallestCount | None:
    """Return the smallest count of examples or people that left a site, by what is known of it.

    Counts of examples are those that clients declared; one that nothing but a guess gives did not
    leave. Of others those count that a rule flags: their values are in the captures where they came
    as metrics, or in the list of what left where its operator asked for values.
    """
    known = _declared(files)
    declared = {one.client for one in known}
    metrics = {(c.round, c.client): c.provenance.metrics for c in files.captures}
    hidden: list[SmallestCount] = []
    for reply in files.left:
        trained = reply.message == "train" and reply.round is not None
        numbers = metrics.get((reply.round or 0, reply.client), {}) if trained else {}
        for thing in reply.things:
            if not any(flag.rule == SMALL_COUNT for flag in thing.flags):
                continue
            if trained and thing.name == NUM_EXAMPLES and reply.client in declared:
                continue
            values = _whole(thing.value) or _whole(str(numbers.get(thing.name, "")))
            value = min(values, default=None)
            found = SmallestCount(client=reply.client, name=thing.name, value=value)
            (hidden if value is None else known).append(found)
    least = min(known, key=lambda one: one.value or 0, default=None)
    if not hidden or (least is not None and (least.value or 0) < FEW):
        return least
    alike = dict.fromkeys(one.client for one in hidden if one.name == hidden[0].name)
    return hidden[0].model_copy(update={"client": listed(list(alike), 3)})


def _declared(files: RunFiles) -> list[SmallestCount]:
    guessed = files.description.guessed if files.description else {}
    counts = [
        (name, trained.num_examples)
        for row in files.metrics
        for name, trained in row.clients.items()
    ]
    if not any(key.rpartition(".")[2] == "num_examples" for key in guessed):
        counts += [(c.client, c.declaration.num_examples) for c in files.captures]
    return [
        SmallestCount(client=name, name=NUM_EXAMPLES, value=count)
        for name, count in counts
        if count
    ]


def _whole(text: str | None) -> list[int]:
    """Return the whole numbers from 1 on in JSON text; empty of other text."""
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return []
    numbers = found if isinstance(found, list) else [found]
    known = [float(n) for n in numbers if isinstance(n, int | float) and not isinstance(n, bool)]
    return [int(n) for n in known if math.isfinite(n) and n >= 1 and n.is_integer()]


def _covers(left: Sequence[LeftReply], captures: Sequence[ObservationFile]) -> bool:
    """Return whether every capture is in the list, as after a run that one version wrote."""
    listed = {(reply.round, reply.node_id) for reply in left}
    return all(
        (c.round, c.provenance.node_id) in listed
        for c in captures
        if c.provenance.node_id is not None
    )


_Entry = tuple[Key, str, int | None, LeftThing, str]
"""Key, client, round, thing, amount."""


def _of_replies(left: Iterable[LeftReply]) -> Iterator[_Entry]:
    layouts: dict[str, list[LeftThing]] = {}
    for reply in left:
        for record, digest in reply.layouts.items():
            own = [t for t in reply.things if t.model and t.record == record]
            arrays = layouts.setdefault(digest, own)
            thing = LeftThing(source="arrays", record=record, name=record, kind="array", dtype="")
            key = (reply.message, record, "", MODEL)
            yield key, reply.client, reply.round, thing, _arrays(arrays)
        for thing in reply.things:
            if not thing.model:
                name = re.sub(r"\d+", "#", thing.name)
                key = (reply.message, thing.record, name, thing.kind)
                yield key, reply.client, reply.round, thing, _amount(thing)


def _arrays(arrays: Sequence[LeftThing]) -> str:
    size = sum(thing.size for thing in arrays)
    return f"{plural(len(arrays), 'array')}, {readable_size(size)}"


def _amount(thing: LeftThing) -> str:
    """Return in words how much one thing is."""
    if thing.kind == "array":
        shape = "×".join(map(str, thing.shape)) or "1"
        return f"{shape} numbers ({thing.dtype})"
    if thing.kind == "bytes" or thing.dtype == "bytes":
        return readable_size(thing.size)
    if thing.kind == "text":
        return plural(thing.size, "character")
    count = thing.shape[0] if thing.shape else 1
    if thing.kind == "texts":
        return plural(count, "text")
    return plural(count, _WHAT.get(thing.dtype, "number"))


def _of_captures(captures: Iterable[ObservationFile]) -> Iterator[_Entry]:
    """Yield what captures name: the update, single metrics, and what was left out of it."""
    for capture in captures:
        reading = capture.provenance.reading
        record = reading.record if reading else "update"
        held = [n for g, names in capture.tensors.items() if g not in _SENT for n in names]
        size = "" if capture.uploaded is None else f", {readable_size(capture.uploaded)}"
        amount = f"{plural(len(held), 'array')}{size}"
        thing = LeftThing(source="arrays", record=record, name=record, kind="array", dtype="")
        yield ("train", record, "", MODEL), capture.client, capture.round, thing, amount
        others = reading.left_out if reading else ()
        listed = {one.name for one in others if one.name is not None}
        for name in capture.provenance.metrics:
            if name not in listed:
                thing = _named("metrics", "metrics", name, "number")
                yield _key(thing), capture.client, capture.round, thing, "1 number"
        for one in others:
            kind = "numbers" if one.values > 1 else "number"
            name = one.record if one.name is None else one.name
            thing = _named(one.kind, one.record, name, "array" if one.name is None else kind)
            amount = plural(one.values, "number or character")
            amount = amount.replace("characters", "characters").replace("number or", "numbers or")
            yield _key(thing), capture.client, capture.round, thing, amount


_SENT = ("parameters", "buffers")


def _named(source: str, record: str, name: str, kind: str) -> LeftThing:
    return LeftThing.model_validate(
        {"source": source, "record": record, "name": name, "kind": kind, "dtype": ""}
    )


def _key(thing: LeftThing) -> Key:
    return "train", thing.record, re.sub(r"\d+", "#", thing.name), thing.kind


def _gathered(entries: Iterable[_Entry]) -> list[LeftRow]:
    found: dict[Key, _Row] = {}
    for key, client, number, thing, amount in entries:
        row = found.setdefault(key, _Row())
        row.amounts.add(amount)
        row.clients.add(client)
        row.rounds |= set() if number is None else {number}
        row.replies += 1
        row.names.add(thing.name)
        row.flagged |= {client} if thing.flags else set()
        row.reasons.update({flag.rule: flag.reason for flag in thing.flags})
        row.labels |= any(flag.labels for flag in thing.flags)
        row.came |= {thing.came} if thing.came else set()
    rows = [row.row(key) for key, row in found.items()]
    rows.sort(key=lambda row: (not row.reasons, row.kind != MODEL))
    return rows


def _range(amounts: set[str]) -> str:
    """Return one amount, or the smallest and largest by their first number."""
    if len(amounts) == 1:
        return next(iter(amounts))
    ordered = sorted(amounts, key=_first_number)
    return f"{ordered[0]} to {ordered[-1]}"


def _first_number(text: str) -> float:
    found = re.match(r"[\d.,]+", text)
    return float(found[0].replace(",", "").rstrip(".") or 0) if found else 0.0


def _policy(came: set[str]) -> str:
    """Return in words what a policy at the site seems to have done to numbers."""
    if came == {"withheld"}:
        return "came without a value, as where the site's policy withholds it"
    if came == {"rounded"}:
        return "came rounded to a few digits"
    if "withheld" in came:
        return "came without a value from some, as where a site's policy withholds it"
    return ""
