"""A SuperLink's own state in one process, with messages that come part by part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store.object_store_factory import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

from bract.installed import flower

IN_MEMORY, SQL = ":flwr-in-memory:", ":memory:"


class SuperLink:
    """Flower's own state of a SuperLink, with one run and some nodes."""

    def __init__(self, database: str) -> None:
        store = ObjectStoreFactory(database)
        self.state: Any = LinkStateFactory(database, NoOpFederationManager(), store).state()
        self.run = self.state.create_run(
            None, None, "hash", {}, "@none/default", None, None, "flwr-serverapp"
        )

    def node(self, name: str) -> int:
        node: int = self.state.create_node("owner", "owner", name.encode(), 30.0)
        self.state.activate_node(node, 30.0)
        return node

    def ask(self, name: str) -> Message:
        """Announce a question without a content to a new node."""
        question = self.question(self.node(name), RecordDict())
        self.list(question)
        return question

    def question(self, node: int, content: RecordDict) -> Message:
        for field, value in (("run_id", self.run), ("node_id", 1), ("task_id", 1)):
            setattr(flower.TaskIdentity, field, value)
        return Message(content, dst_node_id=node, message_type="train")

    def reply(self, question: Message, content: RecordDict) -> Message:
        flower.TaskIdentity.node_id = question.metadata.dst_node_id
        return Message(content, reply_to=question)

    def answer(self, question: Message) -> Upload:
        arrays = ArrayRecord({"w": Array(np.full(4, 1.0, np.float32))})
        return Upload(self, self.reply(question, RecordDict({"update": arrays})))

    def answers(self, *questions: Message) -> list[Message]:
        ids = {question.metadata.message_id for question in questions}
        found: list[Message] = self.state.get_message_res(message_ids=ids, run_id=self.run)
        return found

    def answered(self, *questions: Message) -> list[str]:
        return [message.metadata.reply_to_message_id for message in self.answers(*questions)]

    def list(self, message: Message, tree: ObjectTree | None = None) -> tuple[str, list[str]]:
        """Announce a message with the list of its parts, or with another one."""
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(
            remove_content_from_message(message), tree or get_object_tree(message), session
        )
        assert stored
        return session, missing

    def send(self, message: Message) -> None:
        """Send a message as a whole."""
        session, missing = self.list(message)
        objects = get_all_nested_objects(message)
        for part in missing:
            content = objects[part].deflate()
            assert self.state.store_object(self.run, session, part, content)

    def fetch(self, message: Message) -> dict[str, bytes | None]:
        """Return the parts of a message that is taken, by the list handed on with it."""
        tree = self.state.object_store.get_object_tree(message.metadata.message_id)
        names = [node.object_id for node in iterate_object_tree(tree)]
        return {name: self.state.get_object(self.run, name) for name in names}


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


def restore_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back who this process sends messages as, after a test."""
    for field in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(flower.TaskIdentity, field, getattr(flower.TaskIdentity, field))
