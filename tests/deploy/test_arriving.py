"""A SuperLink hands on an answer once all of its parts have arrived."""

import importlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.object_store_factory import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from refusals import refused

from bract.deploy import arriving
from bract.flower import STATES, TaskIdentity

IN_MEMORY, SQL = ":flwr-in-memory:", ":memory:"


class SuperLink:
    """Flower's own state of a SuperLink, with one run and some nodes."""

    def __init__(self, database: str) -> None:
        store = ObjectStoreFactory(database)
        self.state: Any = LinkStateFactory(database, NoOpFederationManager(), store).state()
        self.run = self.state.create_run(
            None, None, "hash", {}, "@none/default", None, None, "flwr-serverapp"
        )

    def ask(self, name: str) -> Message:
        node = self.state.create_node("owner", "owner", name.encode(), 30.0)
        self.state.activate_node(node, 30.0)
        for field, value in (("run_id", self.run), ("node_id", 1), ("task_id", 1)):
            setattr(TaskIdentity, field, value)
        question = Message(RecordDict(), dst_node_id=node, message_type="train")
        self.list(question)
        return question

    def answer(self, question: Message) -> "Upload":
        TaskIdentity.node_id = question.metadata.dst_node_id
        arrays = ArrayRecord({"w": Array(np.full(4, 1.0, np.float32))})
        return Upload(self, Message(RecordDict({"update": arrays}), reply_to=question))

    def answered(self, *questions: Message) -> list[str]:
        ids = {question.metadata.message_id for question in questions}
        found = self.state.get_message_res(message_ids=ids, run_id=self.run)
        return [message.metadata.reply_to_message_id for message in found]

    def list(self, message: Message) -> tuple[str, list[str]]:
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(message), get_object_tree(message), session
        )
        assert stored
        return session, missing


class Upload:
    """The parts of one answer that the SuperLink lacks."""

    def __init__(self, superlink: SuperLink, reply: Message) -> None:
        self._superlink, self._reply = superlink, reply
        self.parts: dict[str, bytes] = {}
        self._session = ""
        self.list()

    def list(self) -> None:
        """Send the list of parts."""
        self._session, missing = self._superlink.list(self._reply)
        objects = get_all_nested_objects(self._reply)
        self.parts = {part: objects[part].deflate() for part in missing}

    def go_on(self, count: int = 100) -> None:
        """Send so many parts."""
        for part in list(self.parts)[:count]:
            content, run = self.parts.pop(part), self._superlink.run
            assert self._superlink.state.store_object(run, self._session, part, content)


@pytest.fixture
def _ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in STATES:
        state = getattr(importlib.import_module(module), name)
        for method in ("store_message_and_object_tree", "store_object", "get_message_res"):
            monkeypatch.setattr(state, method, getattr(state, method))
    for field in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, field, getattr(TaskIdentity, field))
    arriving.hand_on_whole_answers()


@pytest.mark.usefixtures("_ruled")
@pytest.mark.parametrize("database", [IN_MEMORY, SQL])
def test_an_answer_that_is_being_uploaded_holds_up_no_other(database: str) -> None:
    superlink = SuperLink(database)
    slow, fast = superlink.ask("slow"), superlink.ask("fast")
    uploading = superlink.answer(slow)
    uploading.go_on(1)
    superlink.answer(fast).go_on()
    assert superlink.answered(slow, fast) == [fast.metadata.message_id]
    assert superlink.answered(slow) == []
    uploading.go_on()
    assert superlink.answered(slow) == [slow.metadata.message_id]


@pytest.mark.usefixtures("_ruled")
@pytest.mark.parametrize("database", [IN_MEMORY, SQL])
def test_a_list_that_is_sent_again_names_what_is_still_missing(database: str) -> None:
    superlink = SuperLink(database)
    question = superlink.ask("cut")
    upload = superlink.answer(question)
    every = len(upload.parts)
    upload.go_on(2)
    assert superlink.answered(question) == []
    upload.list()
    assert len(upload.parts) == every - 2
    upload.go_on()
    assert superlink.answered(question) == [question.metadata.message_id]


@pytest.mark.usefixtures("_ruled")
def test_an_upload_that_rests_for_long_is_left_to_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    superlink = SuperLink(IN_MEMORY)
    question = superlink.ask("gone")
    superlink.answer(question).go_on(1)
    assert superlink.answered(question) == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + arriving.REST + 1)
    assert superlink.answered(question) == [question.metadata.message_id]


def test_a_flower_whose_state_lacks_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = STATES[0]
    monkeypatch.setattr(importlib.import_module(module), name, SimpleNamespace())
    with refused("flower-version", "store_message_and_object_tree"):
        arriving.hand_on_whole_answers()
