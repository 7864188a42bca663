"""A SuperLink hands on an answer once all of its parts have arrived.

Flower's hands on an answer when its list of parts comes. The server app then waits for the parts,
and takes no other answer meanwhile: one site with a slow link holds up the round of all, also
where a quorum has answered or the time is over, and the SuperLink, which has no more use for the
list, takes no second one of a SuperNode that has to go on with its upload.

What is being uploaded is known to this process alone: after a restart, Flower's way is followed for
the uploads that were under way.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bract.errors import BractError
from bract.flower import STATES, installed

REST = 180.0
"""Seconds without a new part after which an upload is forgotten, as in Flower."""


@dataclass
class _Upload:
    session: str
    missing: set[str]
    since: float = field(default_factory=time.monotonic)

    @property
    def rests(self) -> bool:
        return time.monotonic() - self.since > REST


class Uploads:
    """The answers whose parts are under way, by the id of the message that each answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_question: dict[str, _Upload] = {}

    def begin(self, question: str, session: str, missing: list[str]) -> None:
        """Note the parts that an answer lacks; a second list replaces the first."""
        with self._lock:
            for other, upload in list(self._by_question.items()):
                if upload.rests or other == question:
                    del self._by_question[other]
            if missing:
                self._by_question[question] = _Upload(session, set(missing))

    def arrived(self, session: str, part: str) -> None:
        """Note that a part has arrived."""
        with self._lock:
            for question, upload in list(self._by_question.items()):
                if upload.session == session:
                    upload.missing.discard(part)
                    upload.since = time.monotonic()
                    if not upload.missing:
                        del self._by_question[question]

    def under_way(self, questions: set[str]) -> set[str]:
        """Return the questions whose answers are being uploaded."""
        with self._lock:
            found = {question: self._by_question.get(question) for question in questions}
        return {question for question, upload in found.items() if upload and not upload.rests}


def hand_on_whole_answers() -> None:
    """Have this SuperLink hand on answers that are whole."""
    for module, name in STATES:
        state = getattr(importlib.import_module(module), name, None)
        for method in ("store_message_and_object_tree", "store_object", "get_message_res"):
            if not callable(getattr(state, method, None)):
                raise BractError(
                    f"{module}.{name} of Flower {installed()} has no {method}: a rule of bract "
                    "would not hold, so the process does not start",
                    code="flower-version",
                )
        _watch(state, Uploads())


def _watch(state: Any, uploads: Uploads) -> None:
    begin: Callable[..., tuple[bool, list[str]]] = state.store_message_and_object_tree
    store: Callable[..., bool] = state.store_object
    answers: Callable[..., list[Any]] = state.get_message_res

    def store_message_and_object_tree(
        self: Any, message: Any, object_tree: Any, session_id: str
    ) -> tuple[bool, list[str]]:
        stored, missing = begin(self, message, object_tree, session_id)
        if stored and message.metadata.reply_to_message_id:
            uploads.begin(message.metadata.reply_to_message_id, session_id, missing)
        return stored, missing

    def store_object(
        self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        stored = store(self, run_id, session_id, object_id, object_content)
        if stored:
            uploads.arrived(session_id, object_id)
        return stored

    def get_message_res(self: Any, message_ids: set[str], run_id: int) -> list[Any]:
        whole = set(message_ids) - uploads.under_way(set(message_ids))
        return answers(self, whole, run_id)

    state.store_message_and_object_tree = store_message_and_object_tree
    state.store_object = store_object
    state.get_message_res = get_message_res
