"""The account of what left the sites: each reply by name, kind and size, and what rules flag."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from flwr.app import Message

from bract.captures.storing import CaptureStore
from bract.errors import BractError, contained, one_line
from bract.protocol.claims import claim_of
from bract.protocol.node_names import ClientNames
from bract.protocol.records import (
    DECLARED,
    DEFENSES,
    EXAMPLES_KEYS,
    is_absence,
    is_bract_reply,
    stated_round,
)
from bract.schema.capture import MOST_ROUNDS
from bract.schema.left import LEFT, MOST_THINGS, Came, Flag, LeftReply, LeftThing
from bract.server.disclosures import flags_of
from bract.server.things import About, Sent, Thing, things_of

_log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Replies that are held until the run is known, and requests without an answer."""

FEW_DIGITS = 4
"""Significant digits up to which numbers count as rounded."""

MOST_LINE = 4 << 20
"""Bytes of a line; of a longer one the things are counted. A reply takes no more of the disk."""

_MOST_VALUE = 1_000_000
_SEEN = 100_000


class LeftAccount:
    """Writes one line a reply to ``left.jsonl``, whatever type of message it answers.

    What a reply held is looked at when it comes, and no value is kept. Lines of a run that is not
    known yet wait; those of other runs in the same process are dropped then.

    Parameters
    ----------
    names
        The clients' names.
    store
        Returns where the captures go.
    enabled
        Whether anything is written.
    values
        Whether values of metrics and config are written, too.
    """

    def __init__(
        self,
        names: ClientNames,
        store: Callable[[], CaptureStore],
        *,
        enabled: bool = True,
        values: bool = False,
    ) -> None:
        self._names = names
        self._store = store
        self._enabled = enabled
        self._values = values
        self._run: str | None = None
        self._requests: OrderedDict[tuple[str, str], tuple[str, int | None, Sent]] = OrderedDict()
        self._last = Sent()
        self._seen: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._listed: set[str] = set()
        self._waiting: list[LeftReply] = []

    def of_run(self, run_id: object) -> None:
        """Take replies of this run alone from now on, and write those that waited."""
        if self._run is None and run_id is not None:
            self._run = str(run_id)
            self._guarded("", self._write)

    def sent(self, messages: Iterable[Message]) -> None:
        """Remember type, round and shapes of requests until their replies come."""
        if self._enabled:
            for message in messages:
                self._guarded("a message", self._remember, message)

    def came(self, replies: Iterable[Message], *, mine: bool = True) -> None:
        """List replies; one that was listed is left out.

        Parameters
        ----------
        mine
            Whether they are known to be of the account's run.
        """
        if not self._enabled:
            return
        replies = list(replies)
        if mine and replies:
            self.of_run(replies[0].metadata.run_id)
        for reply in sorted(replies, key=lambda m: int(m.metadata.src_node_id)):
            self._guarded("a reply", self._list, reply)
        self._guarded("", self._write)

    def _guarded(self, what: str, call: Callable[..., None], *args: object) -> None:
        try:
            with contained():
                call(*args)
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            words = one_line(error, 300)
            _log.warning("%s is not listed in %s: %s", what or "what came", LEFT, words)

    def _remember(self, message: Message) -> None:
        sent = Sent.of(message)
        if sent.records:
            self._last = sent
        meta = message.metadata
        key = str(meta.run_id), str(meta.message_id)
        self._requests[key] = str(meta.message_type), stated_round(message), sent
        while len(self._requests) > MOST_WAITING:
            self._requests.popitem(last=False)

    def _list(self, reply: Message) -> None:
        meta = reply.metadata
        run, asked = str(meta.run_id), str(meta.reply_to_message_id)
        if self._run is not None and run != self._run:
            return
        key = run, asked, str(meta.src_node_id)
        if key in self._seen:
            return
        self._seen[key] = None
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        kind, number, sent = self._requests.pop((run, asked), (str(meta.message_type), None, None))
        sent = self._last if sent is None or not sent.records else sent
        try:
            with contained():
                made = self._reply(reply, kind, number, sent)
        except Exception as error:  # noqa: BLE001 - a reply that cannot be read is listed as such
            _log.warning("what a reply held is not listed in %s: %s", LEFT, one_line(error, 300))
            made = self._line_of(reply, kind, number, unlisted=1)
        self._waiting.append(made)
        del self._waiting[:-MOST_WAITING]

    def _reply(self, reply: Message, kind: str, number: int | None, sent: Sent) -> LeftReply:
        things = things_of(reply, sent)
        about = _about(kind, things, sent)
        silent = _silent(reply)
        judged = [t for t in things if (t.source, t.record) not in silent]
        flags = {id(judged[place]): found for place, found in flags_of(judged, about).items()}
        layouts, listed = self._layouts(things)
        shown = [self._thing(t, flags.get(id(t), [])) for t in listed]
        made = self._line_of(
            reply,
            kind,
            number,
            things=tuple(shown[:MOST_THINGS]),
            layouts=layouts,
            unlisted=max(0, len(shown) - MOST_THINGS),
        )
        if len(_line(made).encode()) > MOST_LINE:
            return self._line_of(reply, kind, number, unlisted=len(shown))
        return made

    def _line_of(self, reply: Message, kind: str, number: int | None, **held: Any) -> LeftReply:
        meta = reply.metadata
        return LeftReply(
            run_id=str(meta.run_id),
            node_id=str(meta.src_node_id),
            client=self._names.of(int(meta.src_node_id)),
            message=one_line(kind, 64),
            round=number if number is not None and 0 <= number <= MOST_ROUNDS else None,
            received=time.time(),
            **held,
        )

    def _layouts(self, things: Sequence[Thing]) -> tuple[dict[str, str], list[Thing]]:
        """Return the digest of each record of model arrays, and the things to list."""
        rows: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
        for thing in things:
            if thing.model:
                rows.setdefault(thing.record, []).append((thing.name, thing.dtype, thing.shape))
        digests = {
            key: sha256(json.dumps([key, held]).encode()).hexdigest()[:16]
            for key, held in rows.items()
        }
        known = {key for key, digest in digests.items() if digest in self._listed}
        self._listed |= set(digests.values())
        listed = [t for t in things if not (t.model and t.record in known)]
        return {_short(key): digest for key, digest in digests.items()}, listed

    def _thing(self, thing: Thing, flags: Sequence[Flag]) -> LeftThing:
        return LeftThing(
            source=thing.source,
            record=_short(thing.record),
            name=_short(thing.name),
            kind=thing.kind,
            dtype=one_line(thing.dtype, 64),
            shape=thing.shape[:64],
            size=thing.size,
            model=thing.model,
            came=None if claim_of(thing.name) else _came(thing),
            claim=_claim(thing),
            flags=tuple(flags),
            value=_text(thing) if self._values and thing.source != "arrays" else None,
        )

    def _write(self) -> None:
        """Append what waits, once the run is known."""
        if self._run is None or not self._waiting:
            return
        lines = [
            _line(line.model_copy(update={"client": self._names.of(int(line.node_id))}))
            for line in self._waiting
            if line.run_id == self._run
        ]
        if lines:
            try:
                self._store().note(LEFT, "\n".join(lines))
            except BractError as error:
                _log.warning("not written yet: %s", one_line(error, 300))
                return
        self._waiting.clear()


def _line(reply: LeftReply) -> str:
    """Return a reply as one line of JSON, without what has its default."""
    held = reply.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return json.dumps({"schema": reply.schema_version, **held}, allow_nan=False, ensure_ascii=False)


def _short(name: str) -> str:
    return one_line(name, 200)


def _silent(reply: Message) -> set[tuple[str, str]]:
    """Return records of bract's own declarations, which name no data."""
    own = reply.has_content() and (is_bract_reply(reply) or is_absence(reply))
    return {("config", DEFENSES)} | ({("config", DECLARED)} if own else set())


def _about(kind: str, things: Sequence[Thing], sent: Sent) -> About:
    examples = {
        int(t.value)
        for t in things
        if t.name in EXAMPLES_KEYS and isinstance(t.value, int | float) and 1 < t.value < 1e12
    }
    sizes = Counter[str]()
    if kind.partition(".")[0] == "train" and not any(t.model for t in things):
        for thing in things:
            sizes[thing.record] += thing.size if thing.source == "arrays" else 0
    update = max(sizes, key=sizes.__getitem__, default=None)
    return About(kind, sent.classes, sent.widths, frozenset(examples), sent.shapes, update)


def _came(thing: Thing) -> Came | None:
    """Return how floating numbers came; of one number, a few digits are no sign where it is short.

    What a site's policy withholds comes as NaN, and what it rounds has few digits.
    """
    if thing.source == "arrays" or thing.dtype != "float" or thing.numbers is None:
        return None
    numbers = thing.numbers
    finite = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return None
    if not finite.size:
        return "withheld"
    digits = max(_digits(value) for value in finite[:1000])
    return "rounded" if 2 <= digits <= FEW_DIGITS else "exact"


def _digits(value: float) -> int:
    """Return the significant decimal digits that write a number exactly."""
    mantissa = repr(abs(float(value))).partition("e")[0].replace(".", "").strip("0")
    return len(mantissa)


def _claim(thing: Thing) -> float | None:
    value = thing.value
    if thing.source not in ("metrics", "config") or isinstance(value, bool):
        return None
    if (
        not isinstance(value, int | float)
        or not math.isfinite(value)
        or claim_of(thing.name) is None
    ):
        return None
    return float(value)


def _text(thing: Thing) -> str | None:
    """Return a value as JSON; bytes as their hexadecimal digits, and nothing that is too long."""
    try:
        text = json.dumps(thing.value, default=lambda held: held.hex())
    except (TypeError, ValueError, AttributeError):
        return None
    return text if len(text) <= _MOST_VALUE else None
