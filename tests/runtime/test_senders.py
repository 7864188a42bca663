"""A SuperLink lets a node touch its own messages alone."""

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from refusals import refused
from ruling import held, put
from superlinks import IN_MEMORY, SQL, SuperLink, restore_afterwards

from bract.installed import flower
from bract.runtime import arriving, parts, senders, trees

fleet_pb2 = importlib.import_module("flwr.proto.fleet_pb2")
message_pb2 = importlib.import_module("flwr.proto.message_pb2")
handlers = held(flower.FLEET)

HELD = (arriving.RULE, trees.RULE, senders.RULE)
DATABASES = pytest.mark.parametrize("database", [IN_MEMORY, SQL])


@pytest.fixture
def _ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    restore_afterwards(monkeypatch)
    monkeypatch.setattr(handlers, "check_abort", lambda *_: None)  # the run is not started
    put(monkeypatch, "flower-superlink", *HELD)


class Site:
    """A node that sends the SuperLink what it likes, signed as itself."""

    def __init__(self, superlink: SuperLink, name: str) -> None:
        self.superlink, self.node = superlink, superlink.node(name)
        self._state = {"state": superlink.state}
        self._store = self._state | {"store": superlink.state.object_store}

    def messages(self, *, together: bool = False) -> Any:
        request = fleet_pb2.PullMessagesRequest()
        if together:
            request.MergeFromString(b"\xc2\x3e\x00")
        request.node.node_id = self.node
        return handlers.pull_messages(request=request, **self._store)

    def pull(self, part: str) -> Any:
        request = message_pb2.PullObjectRequest(run_id=self.superlink.run, object_id=part)
        request.node.node_id = self.node
        return handlers.pull_object(request=request, **self._state)

    def confirm(self, message: str) -> None:
        request = message_pb2.ConfirmMessageReceivedRequest(
            run_id=self.superlink.run, message_object_id=message
        )
        request.node.node_id = self.node
        handlers.confirm_message_received(request=request, **self._store)

    def announce(self, reply: Message, tree: ObjectTree, named: str = "") -> Any:
        reply.metadata.__dict__["_message_id"] = named or reply.object_id
        made = message_to_proto(remove_content_from_message(reply))
        request = fleet_pb2.PushMessagesRequest(messages_list=[made], message_object_trees=[tree])
        request.node.node_id = self.node
        return handlers.push_messages(request=request, **self._state)

    def push(self, session: str, part: str, content: bytes) -> bool:
        request = message_pb2.PushObjectRequest(
            run_id=self.superlink.run, session_id=session, object_id=part, object_content=content
        )
        request.node.node_id = self.node
        stored: bool = handlers.push_object(request=request, **self._state).stored
        return stored

    def answer(self, question: Message, content: RecordDict) -> tuple[str, dict[str, bytes]]:
        """List the parts of an answer; return under which name to send which of them."""
        reply = self.superlink.reply(question, content)
        response = self.announce(reply, get_object_tree(reply))
        objects = get_all_nested_objects(reply)
        return response.session_id, {p: objects[p].deflate() for p in response.objects_to_push}

    def names(self, question: Message, *found: str, named: str = "") -> list[str]:
        """List objects as the parts of an answer; return those that the SuperLink lacks."""
        reply = self.superlink.reply(question, RecordDict())
        root = named or reply.object_id
        tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=name) for name in found])
        return list(self.announce(reply, tree, root).objects_to_push)


class Federation:
    """One question for each of two sites, of the same content."""

    def __init__(self, database: str) -> None:
        self.superlink = SuperLink(database)
        self.evil, self.honest = (Site(self.superlink, name) for name in ("evil", "honest"))
        self.to_evil, self.to_honest = (
            self.superlink.question(site.node, asked()) for site in (self.evil, self.honest)
        )
        for question in (self.to_evil, self.to_honest):
            self.superlink.send(question)

    def check_question(self) -> None:
        """Check that the honest site gets its question as a whole."""
        (found,) = self.honest.messages().messages_list
        assert found.metadata.message_id == id_of(self.to_honest)
        for name, found in get_all_nested_objects(self.to_honest).items():
            assert self.honest.pull(name).object_content == found.deflate()

    def check_answer(self, session: str, parts: dict[str, bytes]) -> None:
        """Check that the honest site's answer arrives as a whole."""
        assert all(self.honest.push(session, *part) for part in parts.items())
        (answer,) = self.superlink.answers(self.to_honest)
        assert not answer.has_error() and all(self.superlink.fetch(answer).values())


def asked() -> RecordDict:
    model = ArrayRecord({"w": Array(np.arange(4.0))})
    return RecordDict({"arrays": model, "config": ConfigRecord({"round": 2})})


def updated() -> RecordDict:
    return RecordDict({"update": ArrayRecord({"w": Array(np.ones(4))}), "declared": DECLARED})


DECLARED = ConfigRecord({"client": "honest"})
"""What each answer of the honest site holds, as every other site knows."""


def refusals(caplog: pytest.LogCaptureFixture, site: Site) -> list[str]:
    """Return what the log says at level warning of a site."""
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [line for line in found if str(site.node) in line]


def id_of(message: Message) -> str:
    found: str = message.metadata.message_id
    return found


@pytest.mark.usefixtures("_ruled")
@DATABASES
def test_a_site_cannot_say_that_another_has_its_message(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(database)
    evil, stolen = federation.evil, id_of(federation.to_honest)
    evil.messages()
    evil.names(federation.to_evil, stolen)
    with caplog.at_level(logging.WARNING):
        evil.confirm(stolen)
        evil.confirm("0" + stolen[1:])
        evil.confirm("")
    assert len(refusals(caplog, evil)) == 3 and stolen in refusals(caplog, evil)[0]
    federation.check_question()
    federation.honest.confirm(stolen)
    assert not federation.honest.pull(stolen).object_found


@pytest.mark.usefixtures("_ruled")
@DATABASES
def test_a_site_reads_the_parts_of_its_own_messages_alone(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(database)
    evil, honest = federation.evil, federation.honest
    session, parts = honest.answer(federation.to_honest, updated())
    assert all(honest.push(session, *part) for part in parts.items())
    wanted = [id_of(federation.to_honest), *parts]
    evil.names(federation.to_evil, *wanted)
    with caplog.at_level(logging.WARNING):
        answers = [evil.pull(part) for part in wanted]
    assert not any(answer.object_found or answer.object_content for answer in answers)
    assert len(refusals(caplog, evil)) == len(wanted)
    for name, found in get_all_nested_objects(federation.to_evil).items():
        assert evil.pull(name).object_content == found.deflate()


@pytest.mark.usefixtures("_ruled")
@DATABASES
@pytest.mark.parametrize("name", ["", "nothing", "another's"])
def test_a_part_is_taken_for_an_upload_of_its_sender_alone(
    database: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(database)
    session, parts = federation.honest.answer(federation.to_honest, updated())
    part = DECLARED.object_id
    used = session if name == "another's" else name
    with caplog.at_level(logging.WARNING):
        assert not federation.evil.push(used, part, parts[part])
        assert not federation.honest.push("", part, parts[part])
    assert [len(refusals(caplog, s)) for s in (federation.evil, federation.honest)] == [1, 1]
    federation.check_answer(session, parts)


@pytest.mark.usefixtures("_ruled")
@DATABASES
def test_an_upload_whose_list_was_handed_on_goes_on(database: str) -> None:
    """As after a restart, which knows of no upload: the server app has the list before parts."""
    federation = Federation(database)
    session, parts = federation.honest.answer(federation.to_honest, updated())
    federation.superlink.state.delete_messages({id_of(federation.to_honest)})
    assert all(federation.honest.push(session, *part) for part in parts.items())


@pytest.mark.usefixtures("_ruled")
@DATABASES
@pytest.mark.parametrize("which", ["a question", "one character", "an answer", "its own question"])
def test_an_answer_under_the_id_of_another_message_is_the_error_of_its_site(
    database: str, which: str
) -> None:
    federation = Federation(database)
    session, parts = federation.honest.answer(federation.to_honest, updated())
    question = id_of(federation.to_honest)
    own = id_of(federation.to_evil)
    federation.evil.confirm(own)
    named = {
        "a question": question,
        "one character": ("0" if question[0] == "1" else "1") + question[1:],
        "an answer": list(parts)[-1],
        "its own question": own,
    }[which]
    if which == "an answer":
        assert all(federation.honest.push(session, *part) for part in parts.items())
    assert federation.evil.names(federation.to_evil, "1" * 64, named=named) == []
    (error,) = federation.superlink.answers(federation.to_evil)
    (content,) = federation.superlink.fetch(error).values()
    assert content is not None and named[:12] in str(Message.inflate(content).error.reason)
    federation.superlink.state.object_store.delete(id_of(error))  # the server app has it
    if which == "an answer":
        parts = {}
    else:
        federation.check_question()
    federation.check_answer(session, parts)


@pytest.mark.usefixtures("_ruled")
@DATABASES
def test_a_list_that_is_sent_again_is_the_same_answer(database: str) -> None:
    federation = Federation(database)
    reply = federation.superlink.reply(federation.to_honest, updated())
    objects = get_all_nested_objects(reply)
    for left in (len(objects), len(objects) - 1):
        response = federation.honest.announce(reply, get_object_tree(reply))
        assert len(response.objects_to_push) == left
        part = response.objects_to_push[0]
        assert federation.honest.push(response.session_id, part, objects[part].deflate())


@pytest.mark.usefixtures("_ruled")
@DATABASES
def test_parts_that_travel_together_are_a_node_s_own_too(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, "flower-superlink", *HELD, parts.TOGETHER_AT_LINK)
    federation = Federation(database)
    response = federation.honest.messages(together=True)
    (found,) = response.messages_list
    assert found.metadata.message_id == id_of(federation.to_honest)
    brought = response.ByteSize()
    objects = [found.deflate() for found in get_all_nested_objects(federation.to_honest).values()]
    assert brought > sum(map(len, objects))
    session, sent = federation.honest.answer(federation.to_honest, updated())
    federation.check_answer(session, sent)


def pushed(sender: int, named: int) -> Any:
    request = fleet_pb2.PushMessagesRequest()
    request.node.node_id = sender
    request.messages_list.add().metadata.src_node_id = named
    return request


def test_an_answer_in_the_name_of_another_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(handlers, "push_messages", lambda **given: taken.append(given["request"]))
    put(monkeypatch, "flower-superlink", senders.RULE)
    own = pushed(7, 7)
    handlers.push_messages(request=own, state=SimpleNamespace())
    with refused("identity-refused", "7", "8"):
        handlers.push_messages(request=pushed(7, 8), state=SimpleNamespace())
    assert taken == [own]
