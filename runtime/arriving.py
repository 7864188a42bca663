"""A SuperLink hands on an answer once all of its parts have arrived.

Flower's hands on an answer when its list of parts comes. The server app then waits for the parts,
and takes no other answer meanwhile: one site with a slow link holds up the round of all, also
where a quorum has answered or the time is over, and the SuperLink, which has no more use for the
list, takes no second one of a SuperNode that has to go on with its upload.

An upload of which no part comes for `REST` seconds is given up, also where its list comes again: an
error of the site that sent it takes the answer's place. Flower's would leave the server app to ask
for the missing parts, and blame itself.

What is being uploaded is known to this process alone: after a restart, Flower's way is followed for
the uploads that were under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bract.installed.flower import STATES
from bract.runtime.rule import Layer, Rule
from bract.runtime.untrusted import error_for

REST = 180.0
"""Seconds without a new part after which an upload is given up; Flower forgets it then."""

_FORGET = 86_400.0


@dataclass
class _Upload:
    session: str
    missing: set[str]
    since: float

    @property
    def rests(self) -> bool:
        return time.monotonic() - self.since > REST


class Uploads:
    """The answers whose parts are under way, by the id of the message that each answers.

    Attributes
    ----------
    noting
        Held while an answer is taken and noted here, and while answers are handed on: none is
        handed on between the two.
    """

    def __init__(self) -> None:
        self.noting = threading.RLock()
        self._lock = threading.Lock()
        self._by_question: dict[str, _Upload] = {}

    def begin(self, question: str, session: str, missing: list[str]) -> None:
        """Note the parts that an answer lacks; a second list replaces the first.

        A list is no part: what rested before it rests on.
        """
        with self._lock:
            before = self._by_question.pop(question, None)
            for other, upload in list(self._by_question.items()):
                if time.monotonic() - upload.since > _FORGET:
                    del self._by_question[other]  # that of a run that is over
            if missing:
                since = time.monotonic() if before is None else before.since
                self._by_question[question] = _Upload(session, set(missing), since)

    def arrived(self, session: str, part: str) -> None:
        """Note that a part has arrived."""
        with self._lock:
            for question, upload in list(self._by_question.items()):
                if upload.session == session:
                    upload.missing.discard(part)
                    upload.since = time.monotonic()
                    if not upload.missing:
                        del self._by_question[question]

    def given_up(self, question: str) -> int:
        """Return how many parts an upload lacks that rests; it is forgotten then."""
        with self._lock:
            upload = self._by_question.get(question)
            if upload is None or not upload.rests:
                return 0
            return len(self._by_question.pop(question).missing)

    def under_way(self, questions: set[str]) -> set[str]:
        """Return the questions whose answers are being uploaded."""
        with self._lock:
            found = {question: self._by_question.get(question) for question in questions}
        return {question for question, upload in found.items() if upload and not upload.rests}


def _put(_: str) -> Mapping[str, Layer]:
    return {place: layer for state in STATES for place, layer in _watched(state, Uploads()).items()}


def _watched(state: str, uploads: Uploads) -> Mapping[str, Layer]:
    """Return layers by which a class of states hands on answers that are whole."""

    def beginning(begin: Callable[..., tuple[bool, list[str]]]) -> Callable[..., Any]:
        def store_message_and_object_tree(
            self: Any, message: Any, object_tree: Any, session_id: str
        ) -> tuple[bool, list[str]]:
            with uploads.noting:
                stored, missing = begin(self, message, object_tree, session_id)
                if stored and message.metadata.reply_to_message_id:
                    uploads.begin(message.metadata.reply_to_message_id, session_id, missing)
            return stored, missing

        return store_message_and_object_tree

    def storing(store: Callable[..., bool]) -> Callable[..., bool]:
        def store_object(
            self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes
        ) -> bool:
            stored = store(self, run_id, session_id, object_id, object_content)
            if stored:
                uploads.arrived(session_id, object_id)
            return stored

        return store_object

    def handing_on(answers: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def get_message_res(self: Any, message_ids: set[str], run_id: int) -> list[Any]:
            with uploads.noting:
                whole = set(message_ids) - uploads.under_way(set(message_ids))
                found = answers(self, whole, run_id)
            return [given_up(self, answer) for answer in found]

        return get_message_res

    def given_up(self: Any, answer: Any) -> Any:
        lacking = uploads.given_up(answer.metadata.reply_to_message_id)
        if not lacking:
            return answer
        why = f"sent no more of its answer for {REST:.0f} s; {lacking} of its parts are missing"
        made = error_for(answer.metadata, why)
        self._store_generated_message(made)
        self.object_store.delete(answer.metadata.message_id)
        return made

    return {
        f"{state}.store_message_and_object_tree": beginning,
        f"{state}.store_object": storing,
        f"{state}.get_message_res": handing_on,
    }


_METHODS = (
    "store_message_and_object_tree(message, object_tree, session_id)",
    "store_object(run_id, session_id, object_id, object_content)",
    "get_message_res(message_ids, run_id)",
    "_store_generated_message",
)

RULE = Rule(
    name="whole answers",
    kind="reliability",
    commands=("flower-superlink",),
    needs=tuple(f"{state}.{method}" for state in STATES for method in _METHODS),
    does="An answer that is still being uploaded holds up no other, nor a quorum; an upload that "
    "stops is its site's error.",
    without="One site with a slow link holds up the round of all.",
    put=_put,
)
