"""Pair what a server sent with the replies, and store both; failures are noted, never raised."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, MessageType, RecordDict

from bract.defenses import DEFENSES as KNOWN
from bract.defenses.entries import read_defense
from bract.errors import BractError, contained, one_line
from bract.parse.strict_json import parse_json
from bract.protocol.arrays import view_arrays
from bract.protocol.node_names import ClientNames
from bract.protocol.observation import ClientDeclaration, Observation
from bract.protocol.reading import Reading, buffers_of, read
from bract.protocol.records import (
    ARRAYS,
    DEFENSES,
    NUM_EXAMPLES_KEY,
    PROXIMAL_KEY,
    Contribution,
    examples_of,
    is_absence,
    is_bract_reply,
    read_metrics,
    read_reply,
    reply_name,
    split_state,
    stated_round,
)
from bract.protocol.rounding import sent_rounded, unagreed_widened
from bract.protocol.storing import CaptureStore, RoundLostError
from bract.protocol.update import Tensors
from bract.schema.capture import (
    MISSED,
    ClientStatement,
    MissedCapture,
    Rounding,
    UpdateKind,
)
from bract.server.capturing import CapturePlan
from bract.server.unaudited import doubt_of

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
            _log.error("a round is not captured: %s", _words(error))

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
            _log.error("replies were not captured: %s", _words(error))

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
            reason = _words(error)
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
            notes.append(f"not trained from what was sent, but from a start of its own: {names}")
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
            groups = _groups(request, answer)
            loss = self._rounding(groups, flags)
            if answer.ciphertexts and mine.encryption == ClientDeclaration.encryption:
                # An app of its own declares nothing; that these are ciphertexts shows.
                mine = mine.updated({"encryption": "paillier"})
        else:
            metrics = read_metrics(
                {k: v for r in reply.content.metric_records.values() for k, v in r.items()}
            )
            claimed = {}
            if metrics.get(NUM_EXAMPLES_KEY) == 0:
                raise BractError(
                    f"it was trained on nothing ({NUM_EXAMPLES_KEY} 0), so no example is in it",
                    code="update-refused",
                )
            if mine.num_examples is None and NUM_EXAMPLES_KEY in metrics:
                claimed["num_examples"] = _or_flag(flags, examples_of, metrics[NUM_EXAMPLES_KEY])
            if DEFENSES in reply.content:
                claimed["defenses"] = _or_flag(flags, _defenses, reply)
            reading = read(
                request.content.array_records,
                reply.content,
                update=self._update,
                preferred=self._preferred,
                compare=DEFENSES not in reply.content,
            )
            groups = _read_groups(reading, self._integers)
            provenance["reading"] = _described(reading, reply.content, self._last.get(name))
            self._note(reading, name)
            if reading.kind == "gradient":
                mine = mine.updated({"algorithm": "fedsgd"})
        claimed = {key: value for key, value in claimed.items() if value is not None}
        statement = _or_flag(flags, _statement, claimed) or ClientStatement()
        declared = _with_sent(_with_sent_mu(mine, request, flags), request)
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


def _groups(request: Message, answer: Contribution) -> dict[str, Tensors]:
    """Return the tensors of an observation of bract's own client."""
    if answer.ciphertexts:
        # All the server has sent in plain is the initial model, to clients that had none yet.
        sent = request.content.array_records.get(ARRAYS)
        parameters, buffers = split_state(view_arrays(sent) if sent else {})
        return {
            "parameters": parameters,
            "buffers": buffers,
            "update": {},
            "ciphertexts": answer.ciphertexts,
        }
    arrays = view_arrays(request.content.array_records[ARRAYS])
    return {
        "parameters": {n: v for n, v in arrays.items() if n in answer.update},
        "buffers": {n: v for n, v in arrays.items() if n not in answer.update},
        "update": answer.update,
        "returned_buffers": answer.buffers,
    }


def _read_groups(reading: Reading, known: set[str]) -> dict[str, Tensors]:
    """Return the tensors of an observation of an app of its own.

    Names of integers are added to ``known``: an average of them comes back as floating numbers.
    """
    known |= {
        name
        for held in (reading.sent, reading.returned)
        for name, value in held.items()
        if not value.is_floating_point()
    }
    buffers = buffers_of(reading, known)
    names = [name for name in reading.returned if name not in buffers]
    if not names:
        raise BractError(
            f"its record {reading.record!r} holds no parameters but buffers alone",
            code="update-refused",
        )
    weights = reading.kind == "weights"
    _, extra = split_state(reading.extra)
    returned = {name: v for name, v in reading.returned.items() if name in buffers} | extra
    return {
        "parameters": {name: reading.sent[name] for name in names},
        "buffers": {n: v for n, v in reading.sent.items() if n in buffers} | reading.absent,
        "update": reading.update(names),
        "returned_buffers": returned if weights else {},
    }


def _described(reading: Reading, content: RecordDict, previous: int | None) -> dict[str, Any]:
    """Return the fields of an `UploadReading`, within its bounds."""
    return {
        "record": _short(reading.record),
        "update": reading.kind,
        "source": reading.source,
        "cosine": reading.cosine,
        "matched": reading.matched,
        "absent": _names_of(reading.absent),
        "extra": _names_of(reading.extra),
        "unlike": _names_of(reading.unlike),
        "previous": previous,
        "left_out": _left_out(reading, content)[:1000],
    }


def _left_out(reading: Reading, content: RecordDict) -> list[dict[str, Any]]:
    """List what a reply holds besides the record that was taken."""
    arrays = [
        {
            "kind": "arrays",
            "record": _short(key),
            "values": sum(math.prod(array.shape) for array in content.array_records[key].values()),
        }
        for key in reading.left_out
    ]
    others = [
        {"kind": kind, "record": _short(key), "name": _short(name), "values": _size(value)}
        for kind, records in (
            ("metrics", content.metric_records),
            ("config", content.config_records),
        )
        for key, record in records.items()
        if key != DEFENSES
        for name, value in record.items()
    ]
    return arrays + others


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list) else 1


def _short(name: str) -> str:
    return one_line(name, 200)


def _names_of(names: Iterable[str]) -> list[str]:
    return [_short(name) for name in names][:1000]


def _with_sent_mu(
    declaration: ClientDeclaration, request: Message, flags: list[str]
) -> ClientDeclaration:
    """Declare the proximal term that the train message asked for, unless the operator did."""
    sent = next(
        (r[PROXIMAL_KEY] for r in request.content.config_records.values() if PROXIMAL_KEY in r),
        None,
    )
    if sent is None:
        return declaration
    own = declaration.proximal_mu
    if own is None:
        changed = _or_flag(flags, declaration.updated, {"proximal_mu": sent})
        return declaration if changed is None else changed
    if own != sent:
        flags.append(
            f"was sent {PROXIMAL_KEY} {one_line(sent, 40)}, the server declares proximal_mu "
            f"{own}; what it declares was used"
        )
    return declaration


SENT = {
    "lr": ("lr", "learning-rate", "learning_rate"),
    "momentum": ("momentum",),
    "weight_decay": ("weight-decay", "weight_decay"),
    "dropout": ("dropout",),
    "batch_size": ("batch-size", "batch_size"),
    "local_steps": ("local-steps", "local_steps"),
}
"""Config keys of a train message, by the declared field they set."""


def _with_sent(declaration: ClientDeclaration, request: Message) -> ClientDeclaration:
    """Declare the train message's config where the operator declared nothing.

    A value that no client could follow is left out.
    """
    blank = ClientDeclaration()
    for field, keys in SENT.items():
        if getattr(declaration, field) != getattr(blank, field):
            continue
        for record in request.content.config_records.values():
            sent = next((record[key] for key in keys if key in record), None)
            if isinstance(sent, bool) or not isinstance(sent, int | float):
                continue
            with contextlib.suppress(BractError):
                declaration = declaration.updated({field: sent})
    return declaration


def _statement(claimed: dict[str, Any]) -> ClientStatement:
    """Read a client's statement; the defenses that it names are known here, with their ranges."""
    statement = ClientStatement.of(claimed)
    for entry in statement.defenses or ():
        read_defense(entry)
    return statement


def _defenses(reply: Message) -> Any:
    chain = reply.content.config_records[DEFENSES].get("chain")
    if not isinstance(chain, str):
        raise BractError(
            f"declared its defenses as a {type(chain).__name__}, expected JSON",
            code="message-malformed",
        )
    return parse_json(chain, most=16_384)


def _or_flag(flags: list[str], read: Callable[[Any], Any], value: Any) -> Any:
    """Read a client's claim about itself; what cannot be read is flagged and left out."""
    try:
        return read(value)
    except (BractError, KeyError) as error:
        flags.append(f"{_words(error)}; that was left out")
        return None


def _counted(kinds: Counter[str], what: str) -> str:
    return ", ".join(f"{number} {what} of type {kind}" for kind, number in kinds.items())


def _trains(kind: str) -> bool:
    return kind.partition(".")[0] == MessageType.TRAIN


def _answers(reply: Message, request: Message) -> bool:
    return bool(reply.metadata.reply_to_message_id == request.metadata.message_id)


def _round_of(request: Message, counted: int) -> int:
    stated = stated_round(request)
    return counted if stated is None else stated


def _words(error: Exception) -> str:
    text = one_line(error, 500)
    return text if isinstance(error, BractError) else f"{type(error).__name__}: {text}"
