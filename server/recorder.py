"""Pair what a server sent with the replies, and store both; failures are noted, never raised."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message, MessageType

from bract.defenses import DEFENSES as KNOWN
from bract.defenses.entries import read_defense
from bract.errors import BractError, one_line
from bract.names import ClientNames
from bract.protocol.arrays import view_arrays
from bract.protocol.observation import ClientDeclaration, Observation
from bract.protocol.records import (
    ARRAYS,
    DEFENSES,
    NUM_EXAMPLES_KEY,
    PROXIMAL_KEY,
    ROUND_KEY,
    Contribution,
    examples_of,
    is_absence,
    is_bract_reply,
    read_metrics,
    read_reply,
    reply_name,
    split_state,
)
from bract.protocol.rounding import sent_rounded, unagreed_widened
from bract.protocol.storing import CaptureStore, RoundLostError
from bract.protocol.update import Tensors, difference
from bract.schema.capture import MISSED, ClientStatement, MissedCapture, Rounding
from bract.server.capturing import CapturePlan
from bract.strict_json import parse_json

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
        self._told_missing = False

    def sent(self, messages: Iterable[Message]) -> None:
        """Remember train messages until their replies arrive."""
        try:
            train = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
            if train:
                self._batches += 1
                number = _round_of(train[0], self._batches)
                kept = [(n, m) for n, m in self._open if n == number]
                if not kept:
                    self.tell_missing()
                self._open = kept + [(_round_of(m, self._batches), m) for m in train]
        except Exception as error:  # noqa: BLE001 - around a third-party strategy nothing may raise
            _log.error("a round is not captured: %s", _words(error))

    def received(self, replies: Iterable[Message], *, all_came: bool = True) -> None:
        """Store one observation for every reply that carries content.

        Parameters
        ----------
        all_came
            False where further replies of the round may come.
        """
        try:
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
            return
        server_round, request = found
        if not self.plan.takes_round(server_round):
            return
        node_id = request.metadata.dst_node_id
        lost = self._lost
        try:
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

    def _miss(self, server_round: int, node_id: int, reason: str) -> None:
        self._unwritten.append(
            MissedCapture(round=server_round, node_id=str(node_id), reason=reason)
        )

    def tell_missing(self) -> None:
        """Log once, when the first round has closed, which clients to capture have not replied."""
        missing = self.plan.missing(self._seen) if self._seen and not self._told_missing else []
        if missing:
            _log.warning(
                "capture.clients: no %s has replied yet; replied have %s",
                one_line(" or ".join(missing), 200),
                one_line(", ".join(sorted(self._seen)), 200),
            )
        self._told_missing = self._told_missing or bool(self._seen)

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
            if mine.num_examples is None and NUM_EXAMPLES_KEY in metrics:
                claimed["num_examples"] = _or_flag(flags, examples_of, metrics[NUM_EXAMPLES_KEY])
            if DEFENSES in reply.content:
                claimed["defenses"] = _or_flag(flags, _defenses, reply)
            groups = _third_party_groups(request, reply)
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
    arrays = _all_arrays(request)
    return {
        "parameters": {n: v for n, v in arrays.items() if n in answer.update},
        "buffers": {n: v for n, v in arrays.items() if n not in answer.update},
        "update": answer.update,
        "returned_buffers": answer.buffers,
    }


def _third_party_groups(request: Message, reply: Message) -> dict[str, Tensors]:
    """Return the tensors of an observation of a client that replies with its local weights."""
    sent, came = _all_arrays(request), _all_arrays(reply)
    if not came:
        raise BractError("it holds no arrays", code="update-refused")
    parameters, buffers = split_state(sent)
    returned, returned_buffers = split_state(came)
    wrong = sorted(set(parameters) ^ set(returned)) or [
        name for name, value in parameters.items() if value.shape != returned[name].shape
    ]
    if wrong:
        names = one_line(", ".join(wrong[:5]), 200)
        raise BractError(f"it holds other arrays than were sent: {names}", code="update-refused")
    return {
        "parameters": parameters,
        "buffers": buffers,
        "update": difference(parameters, returned),
        "returned_buffers": returned_buffers,
    }


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


def _answers(reply: Message, request: Message) -> bool:
    return bool(reply.metadata.reply_to_message_id == request.metadata.message_id)


def _round_of(request: Message, counted: int) -> int:
    for record in request.content.config_records.values():
        value = record.get(ROUND_KEY)
        if isinstance(value, int):
            return value
    return counted


def _all_arrays(message: Message) -> Tensors:
    """Return a message's tensors, which are read, measured and written, never changed."""
    tensors: Tensors = {}
    for record in message.content.array_records.values():
        tensors |= view_arrays(record)
    return tensors


def _words(error: Exception) -> str:
    text = one_line(error, 500)
    return text if isinstance(error, BractError) else f"{type(error).__name__}: {text}"
