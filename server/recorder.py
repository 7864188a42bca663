"""Pair what a server sent with the replies, and store both; failures are noted, never raised."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, MessageType

from bract.captures.observation import ClientDeclaration, Observation
from bract.captures.storing import CaptureStore, RoundLostError
from bract.defenses import DEFENSES as KNOWN
from bract.errors import BractError, contained, one_line
from bract.protocol.node_names import ClientNames
from bract.protocol.reading import Reading, read
from bract.protocol.records import (
    DEFENSES,
    EXAMPLES_KEYS,
    examples_of,
    is_absence,
    is_bract_reply,
    read_metrics,
    read_reply,
    reply_name,
    stated_round,
)
from bract.schema.capture import MISSED, MissedCapture, Rounding, UpdateKind
from bract.schema.declaration import ClientStatement
from bract.server.capturing import CapturePlan
from bract.server.declaring import (
    error_words,
    or_flag,
    read_defenses,
    read_statement,
    with_sent,
    with_sent_mu,
)
from bract.server.grouping import described, groups_of_reading, groups_of_reply
from bract.server.unaudited import doubt_of
from bract.updates.rounding import sent_rounded, unagreed_widened
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)


class Recorder:
    """Pair what was sent with the replies, and store both.

    Parameters
    ----------
    declaration
        The operator's declaration of every client's computation, in the first round.
    plan
        Which replies to capture, and how.
    names
        The clients' names, bound to nodes.
    by_round
        The operator's declaration of a later round; None where all rounds are alike.
    update_dtype
        The run's ``training.update_dtype``: ``float32``, or in what clients were asked to send.
    update
        What an app of its own replies with; None: what the values show.
    preferred
        Key of the record of arrays that holds the model, as the strategy knows it.

    Attributes
    ----------
    connected
        Returns the connected nodes, to distinguish a restarted client from a second one of the
        same name.
    """

    def __init__(
        self,
        store: CaptureStore,
        declaration: ClientDeclaration,
        plan: CapturePlan,
        names: ClientNames,
        by_round: Callable[[int], ClientDeclaration] | None = None,
        update_dtype: str = "float32",
        update: UpdateKind | None = None,
        preferred: str | None = None,
    ) -> None:
        self.store = store
        self.declaration = declaration
        self._by_round = by_round or (lambda _: declaration)
        self._update_dtype = update_dtype
        self.plan = plan
        self.names = names
        self.connected: Callable[[], Iterable[int]] | None = None
        self._open: list[tuple[int, Message]] = []
        self._batches = 0
        self._unwritten: list[MissedCapture] = []
        self._lost: tuple[int, str] | None = None
        self._made_room_for = 0
        self._seen: set[str] = set()
        self._warned_missing = False
        self._doubted = False
        self._update = update
        self._preferred = preferred
        self._integers: set[str] = set()
        self._last: dict[str, int] = {}
        self._noted: set[str] = set()
        self._types = Counter[str]()
        self._others = Counter[str]()
        self._warned_uncaptured = False
        self._answered = False
        self._first_error = ""

    def sent(self, messages: Iterable[Message]) -> None:
        """Remember train messages until their replies arrive."""
        try:
            with contained():
                messages = list(messages)
                self._types.update(m.metadata.message_type for m in messages)
                train = [m for m in messages if _trains(m.metadata.message_type)]
                if train:
                    self._batches += 1
                    number = _round_of(train[0], self._batches)
                    kept = [(n, m) for n, m in self._open if n == number]
                    if not kept:
                        self.tell_missing()
                    self._open = kept + [(_round_of(m, self._batches), m) for m in train]
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            _log.error("a round is not captured: %s", error_words(error))

    def received(
        self, replies: Iterable[Message], *, all_came: bool = True, reason: str = ""
    ) -> None:
        """Store one observation for every reply that carries content.

        Parameters
        ----------
        all_came
            False where further replies of the round may come.
        reason
            Why others did not come, where that is known.
        """
        try:
            with contained():
                self._first_error = self._first_error or reason
                replies = list(replies)
                self._count_others(replies)
                for reply in sorted(replies, key=lambda m: m.metadata.src_node_id):
                    self._store(reply)
                self._write_missed()
                if all_came or not self._open:
                    self.tell_missing()
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            _log.error("replies were not captured: %s", error_words(error))

    def _store(self, reply: Message) -> None:
        found = next((entry for entry in self._open if _answers(reply, entry[1])), None)
        if found is None:
            return
        self._open.remove(found)
        if not reply.has_content():
            self._first_error = self._first_error or one_line(reply.error.reason, 500)
            return
        self._answered = True
        server_round, request = found
        if not self.plan.takes_round(server_round):
            return
        node_id = request.metadata.dst_node_id
        lost = self._lost
        try:
            with contained():
                own = is_bract_reply(reply) or is_absence(reply)
                name, flags = self._name(node_id, reply_name(reply) if own else None)
                self._seen.add(name)
                if is_absence(reply):
                    return
                if not self.plan.takes(server_round, name):
                    return
                if lost is not None and lost[0] == server_round:
                    self._miss(server_round, node_id, lost[1])
                    return
                observation = self._observe(request, reply, server_round, name, flags)
                if self._made_room_for < server_round:
                    self._made_room_for = server_round
                    self.plan.make_room(self.store, server_round)
                self.store.save(self.plan.stored(observation))
                self._last[name] = server_round
                self._doubt(observation)
        except Exception as error:  # noqa: BLE001 - one reply, whatever it holds, stops nothing else
            reason = error_words(error)
            _log.error(
                "round %d: the reply of %s was not captured: %s",
                server_round,
                self.names.of(node_id),
                reason,
            )
            if isinstance(error, RoundLostError):
                self._lost = server_round, reason
                _log.error("round %d: nor are the replies after it", server_round)
            self._miss(server_round, node_id, reason)

    def _doubt(self, observation: Observation) -> None:
        """Log once a run, at its first capture, what an audit may not handle."""
        if self._doubted:
            return
        self._doubted = True
        if doubt := doubt_of(observation):
            _log.warning("this app may not be audited: %s", one_line(doubt, 500))

    def _miss(self, server_round: int, node_id: int, reason: str) -> None:
        self._unwritten.append(
            MissedCapture(round=server_round, node_id=str(node_id), reason=reason)
        )

    def tell_missing(self) -> None:
        """Log once, when the first round has closed, which clients to capture have not replied."""
        missing = self.plan.missing(self._seen) if self._seen and not self._warned_missing else []
        if missing:
            _log.warning(
                "capture.clients: no %s has replied yet; replied have %s",
                one_line(" or ".join(missing), 200),
                one_line(", ".join(sorted(self._seen)), 200),
            )
        self._warned_missing = self._warned_missing or bool(self._seen)

    def _count_others(self, replies: Iterable[Message]) -> None:
        """Count, by the type of their request, replies that hold arrays and are not captured."""
        for reply in replies:
            kind = str(reply.metadata.message_type)
            if not _trains(kind) and reply.has_content() and reply.content.array_records:
                self._others[kind] += 1

    def tell_uncaptured(self) -> None:
        """Log, at the end of a run and once, what was sent or came and was not captured."""
        if not self._types or not self.plan.config.enabled or self._warned_uncaptured:
            return
        self._warned_uncaptured = True
        if self._answered:
            if self._others:
                _log.warning(
                    "not captured: %s, since replies to messages of type train are",
                    one_line(_counted(self._others, "replies with arrays"), 300),
                )
            return
        sent = _counted(self._types, "messages")
        if not any(map(_trains, self._types)):
            why = "and none of type train, whose replies are captured"
        elif self._first_error:
            why = f"and answered by errors alone, the first: {self._first_error}"
        else:
            why = "and none was answered"
        _log.warning("nothing was captured: %s were sent, %s", one_line(sent, 300), why)

    def _note(self, reading: Reading, name: str) -> None:
        """Log what is unusual about a reply, each once a run."""
        notes = []
        if reading.matched == "order":
            notes.append(
                "the names of returned arrays are not those that were sent; they are paired by "
                "their order, since all shapes agree"
            )
        if reading.left_out:
            left = one_line(", ".join(reading.left_out), 200)
            notes.append(f"the record {reading.record!r} is read as the model, left out: {left}")
        if reading.absent:
            names = one_line(", ".join(reading.absent), 200)
            notes.append(f"sent and not returned, so unknown to an audit: {names}")
        if reading.extra:
            names = one_line(", ".join(reading.extra), 200)
            notes.append(f"returned and not sent, so left out: {names}")
        if reading.unlike:
            names = one_line(", ".join(reading.unlike), 200)
            notes.append(
                "returned with nothing of what was sent, so trained from a start of its own, or "
                f"diverged: {names}"
            )
        for note in notes:
            if note not in self._noted and len(self._noted) < 100:
                self._noted.add(note)
                _log.warning("%s, as other clients may: %s", name, note)

    def _write_missed(self) -> None:
        """Append missed captures; if the disk is full, try again after the next replies."""
        if not self._unwritten:
            return
        try:
            while self._unwritten:
                line = self._unwritten[0].model_dump_json(by_alias=True)
                self.store.note(MISSED, line)
                self._unwritten.pop(0)
        except BractError as error:
            _log.warning("not written yet: %s", error)

    def _observe(
        self, request: Message, reply: Message, server_round: int, name: str, flags: list[str]
    ) -> Observation:
        node_id = request.metadata.dst_node_id
        own = is_bract_reply(reply)
        provenance: dict[str, Any] = {
            "run_id": str(reply.metadata.run_id),
            "node_id": str(node_id),
            "received": time.time(),
        }
        mine = self._by_round(server_round)
        groups: dict[str, Tensors]
        loss = None
        if own:
            answer = read_reply(reply)
            claimed: dict[str, Any] = {"num_examples": answer.num_examples, **answer.declaration}
            metrics = answer.metrics
            groups = groups_of_reply(request, answer)
            loss = self._rounding(groups, flags)
            if answer.ciphertexts and mine.encryption == ClientDeclaration.encryption:
                # An app of its own declares nothing; that these are ciphertexts shows.
                mine = mine.updated({"encryption": "paillier"})
        else:
            metrics = read_metrics(
                {k: v for r in reply.content.metric_records.values() for k, v in r.items()}
            )
            claimed = {}
            count = next((key for key in EXAMPLES_KEYS if key in metrics), None)
            if count is not None and metrics[count] == 0:
                raise BractError(
                    f"it was trained on nothing ({count} 0), so no example is in it",
                    code="update-refused",
                )
            if mine.num_examples is None and count is not None:
                claimed["num_examples"] = or_flag(flags, examples_of, metrics[count])
            if DEFENSES in reply.content:
                claimed["defenses"] = or_flag(flags, read_defenses, reply)
            reading = read(
                request.content.array_records,
                reply.content,
                update=self._update,
                preferred=self._preferred,
                compare=DEFENSES not in reply.content,
            )
            groups = groups_of_reading(reading, self._integers)
            provenance["reading"] = described(reading, reply.content, self._last.get(name))
            self._note(reading, name)
            if reading.kind == "gradient":
                mine = mine.updated({"algorithm": "fedsgd"})
        claimed = {key: value for key, value in claimed.items() if value is not None}
        statement = or_flag(flags, read_statement, claimed) or ClientStatement()
        declared = with_sent(with_sent_mu(mine, request, flags), request)
        declaration, compared = statement.lay_over(
            declared, claimed, lambda name: name in KNOWN and KNOWN[name].changes_model()
        )
        flags += compared
        for flag in flags:
            _log.warning("round %d: %s %s", server_round, name, flag)
        return Observation(
            round=server_round,
            client=name,
            declaration=declaration,
            provenance=provenance | {"metrics": metrics, "flags": tuple(flags)},
            rounded=loss,
            computed=False,
            **groups,
        )

    def _rounding(self, groups: dict[str, Tensors], flags: list[str]) -> Rounding | None:
        """Return how a client rounded as asked; what it rounded unasked is flagged and widened."""
        sent, parameters, agreed = groups["update"], groups["parameters"], self._update_dtype
        groups["update"], unasked = unagreed_widened(sent, parameters, agreed)
        if unasked:
            dtypes = sorted({str(sent[name].dtype).removeprefix("torch.") for name in unasked})
            flags.append(
                f"sent {one_line(', '.join(unasked[:5]), 200)} as {' and '.join(dtypes)}, "
                f"training.update_dtype is {agreed}; taken as float32"
            )
        return sent_rounded(groups["update"], parameters, agreed)

    def _name(self, node_id: int, claimed: object) -> tuple[str, list[str]]:
        if claimed is None:
            return self.names.of(node_id), []
        try:
            return self.names.claim(node_id, claimed, self.connected), []
        except BractError as error:
            name = self.names.of(node_id)
            return name, [f"{one_line(error, 300)}; it was filed under {name}"]


def _counted(kinds: Counter[str], what: str) -> str:
    return ", ".join(f"{number} {what} of type {kind}" for kind, number in kinds.items())


def _trains(kind: str) -> bool:
    return kind.partition(".")[0] == MessageType.TRAIN


def _answers(reply: Message, request: Message) -> bool:
    return bool(reply.metadata.reply_to_message_id == request.metadata.message_id)


def _round_of(request: Message, counted: int) -> int:
    stated = stated_round(request)
    return counted if stated is None else stated
