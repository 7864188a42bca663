"""Parts of a message that travel together, through the handlers of a SuperNode."""

import hashlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ruling import held, put

from bract.installed import flower
from bract.runtime import parts

message_pb2 = importlib.import_module("flwr.proto.message_pb2")
runtime_pb2 = importlib.import_module("flwr.proto.runtime_pb2")

CONTENTS = [b"message", b"x" * 200, b"y" * 70_000]
IDS = [hashlib.sha256(content).hexdigest() for content in CONTENTS]
TASK = SimpleNamespace(run_id=7)


class Node:
    """A SuperNode's handlers with one message, and a client that asks them."""

    def __init__(self) -> None:
        self.there = dict(zip(IDS, CONTENTS, strict=True))
        self.stored: list[tuple[int, str, str, bytes]] = []
        self.full = ""
        self.requests: list[str] = []
        self.state = SimpleNamespace(
            get_object=lambda _, part: self.there.get(part),
            start_session=lambda _: "session",
            record_message_processing_end=lambda **_: None,
            store_message_and_object_tree=lambda *_: (True, IDS),
            store_object=self.store,
        )
        self.client = parts._Exchange()

    def store(self, run: int, session: str, part: str, content: bytes) -> bool:
        self.stored.append((run, session, part, content))
        return part != self.full

    def send(self, method: str, request: Any, response: Any) -> Any:
        """Ask as one of our clients does."""
        given = {"request": request, "rpc_method": f"/flwr.proto.Runtime/{method}"}
        return self.client.send(self.handle, given | {"response_type": response})

    def handle(self, *, request: Any, rpc_method: str, response_type: Any) -> Any:
        """Send a request over the wire, and its answer back."""
        method = rpc_method.rpartition("/")[2]
        self.requests.append(method)
        names = {"PullMessages": "pull_messages", "PushMessages": "push_messages"}
        names |= {"PullObject": "pull_object", "PushObject": "push_object"}
        handler = getattr(held(flower.NODE_RUNTIME), names[method])
        asked = type(request).FromString(request.SerializeToString(deterministic=True))
        return response_type.FromString(handler(asked, self.state, TASK).SerializeToString())

    def pull(self) -> Any:
        return self.send(
            "PullMessages",
            runtime_pb2.PullAppMessagesRequest(),
            runtime_pb2.PullAppMessagesResponse,
        )

    def part(self, part: str) -> bytes:
        request = message_pb2.PullObjectRequest(run_id=7, object_id=part)
        found = self.send("PullObject", request, message_pb2.PullObjectResponse)
        assert found.object_found
        content: bytes = found.object_content
        return content

    def push(self) -> list[bool]:
        pushed = runtime_pb2.PushAppMessagesRequest()
        pushed.messages_list.add().metadata.run_id = 7
        pushed.message_object_trees.add()
        self.send("PushMessages", pushed, runtime_pb2.PushAppMessagesResponse)
        stored = []
        for part, content in zip(IDS, CONTENTS, strict=True):
            request = message_pb2.PushObjectRequest(
                run_id=7, session_id="session", object_id=part, object_content=content
            )
            stored.append(self.send("PushObject", request, message_pb2.PushObjectResponse).stored)
        return stored


def answer(*_: Any, **__: Any) -> Any:
    """Answer a question for messages with one, whose tree names a part twice."""
    response = runtime_pb2.PullAppMessagesResponse()
    response.messages_list.add().metadata.run_id = 7
    tree = response.message_object_trees.add()
    tree.object_id = IDS[0]
    for part in (*IDS[1:], IDS[1]):
        tree.children.add().object_id = part
    return response


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    handlers = held(flower.NODE_RUNTIME)
    monkeypatch.setattr(handlers, "pull_messages", answer)
    for name in ("push_messages", "push_object"):
        monkeypatch.setattr(handlers, name, getattr(handlers, name))
    accepts = importlib.import_module("flwr.common.serde").message_from_proto
    assert accepts  # what push_messages reads a message with, here one without a content
    monkeypatch.setattr(
        handlers,
        "message_from_proto",
        lambda _: SimpleNamespace(
            metadata=SimpleNamespace(message_id="m", reply_to_message_id="r")
        ),
    )
    yield Node()


@pytest.fixture
def together(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    put(monkeypatch, "flower-supernode", parts.TOGETHER_AT_NODE)
    return node


def test_the_mark_and_the_parts_are_encoded_as_field_1000() -> None:
    message = message_pb2.PullObjectRequest()
    parts._append(message, b"a")
    assert message.SerializeToString() == b"\xc2\x3e\x01a", "1000 << 3 | 2, then the length"
    for size in (0x7F, 0x80, 0x3FFF, 0x4000):
        found = message_pb2.PullObjectRequest()
        parts._append(found, b"z" * size)
        assert list(parts._fields(type(found).FromString(found.SerializeToString()))) == [
            b"z" * size
        ]


def test_the_parts_of_a_message_come_with_it(together: Node) -> None:
    together.pull()
    assert [together.part(part) for part in (*IDS, IDS[1])] == [*CONTENTS, CONTENTS[1]]
    assert together.requests == ["PullMessages"]


def test_a_part_that_is_not_there_yet_is_asked_for(together: Node) -> None:
    together.there[IDS[1]] = b""
    together.pull()
    together.there[IDS[1]] = CONTENTS[1]
    assert [together.part(part) for part in IDS] == CONTENTS
    assert together.requests == ["PullMessages", "PullObject"]


def test_parts_that_are_too_large_together_are_asked_for(
    together: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MOST", 1000)
    together.pull()
    assert [together.part(part) for part in IDS] == CONTENTS
    assert together.requests == ["PullMessages", "PullObject"]


def test_the_parts_of_a_message_are_sent_with_the_last(together: Node) -> None:
    assert together.push() == [True, True, True]
    assert together.requests == ["PushMessages", "PushObject"]
    assert sorted(together.stored) == sorted(
        (7, "session", part, content) for part, content in zip(IDS, CONTENTS, strict=True)
    )


def test_a_large_part_is_sent_alone(together: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST", 100)
    assert together.push() == [True, True, True]
    assert together.requests == ["PushMessages", "PushObject", "PushObject"]
    assert {part for _, _, part, _ in together.stored} == set(IDS)


def test_a_request_is_copied_once_for_all_its_parts(
    together: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[tuple[int, int]]()

    def without_parts(request: Any) -> Any:
        alone = copied(request)
        sizes.append((request.ByteSize(), alone.ByteSize()))
        return alone

    copied = parts._without_parts
    monkeypatch.setattr(parts, "_without_parts", without_parts)
    assert together.push() == [True, True, True]
    ((all_parts, common),) = sizes
    assert common < 200 < 70_000 < all_parts


def test_a_part_that_is_not_stored_is_reported(together: Node) -> None:
    together.full = IDS[0]
    assert together.push() == [True, True, False]


@pytest.mark.parametrize("do", [Node.pull, Node.push])
def test_a_peer_without_this_rule_is_asked_part_by_part(
    node: Node, do: Callable[[Node], Any]
) -> None:
    do(node)
    for part in IDS:
        node.part(part)
    assert node.requests.count("PullObject") == 3
    assert node.requests.count("PushObject") == (3 if do is Node.push else 0)


def test_a_client_without_this_rule_is_answered_as_by_flower(together: Node) -> None:
    found = together.handle(
        request=runtime_pb2.PullAppMessagesRequest(),
        rpc_method="PullMessages",
        response_type=runtime_pb2.PullAppMessagesResponse,
    )
    assert not list(parts._fields(found))
