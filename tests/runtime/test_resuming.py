"""A SuperNode goes on with an upload whose parts the SuperLink refuses."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from ruling import put

from bract.installed import flower
from bract.runtime.resuming import AGAIN, RULE

PARTS = {name: name.encode() * 3 for name in "abcdef"}


class SuperLink:
    """Takes parts as Flower's does: once each, under the newest session alone."""

    def __init__(self, refuse: Callable[["SuperLink", str], None] = lambda *_: None) -> None:
        self.held: dict[str, bytes] = {}
        self.lists = 0
        self.moved: list[str] = []
        self.before_part = refuse

    def send(self, _message: Any, _tree: Any, runtime: float) -> tuple[set[str], str]:
        assert runtime == 1.5
        self.lists += 1
        return set(PARTS) - set(self.held), f"session {self.lists}"

    def push(self, run_id: int, session: str, part: str, content: bytes) -> None:
        self.moved.append(part)
        self.before_part(self, part)
        if session != f"session {self.lists}" or part in self.held:
            raise ObjectPushError(part, run_id, session)
        assert content == PARTS[part]
        self.held[part] = content


class Store:
    """A SuperNode's parts; ``late`` is there only when it is asked for again."""

    def __init__(self, late: str = "") -> None:
        self._late = [late]

    def get_object_tree(self, _: str) -> ObjectTree:
        return ObjectTree(object_id="a", children=[ObjectTree(object_id=n) for n in "bcdef"])

    def get(self, part: str) -> bytes:
        if part in self._late:
            self._late.remove(part)
            return b""
        return PARTS[part]

    def delete(self, _: str) -> None:
        pass


def upload(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch, late: str = "") -> None:
    """Let Flower's own loop send one message."""
    loop = importlib.import_module(flower.SUPERNODE)
    put(monkeypatch, "flower-supernode", RULE)
    metadata = SimpleNamespace(
        message_id="a", reply_to_message_id="asked", run_id=7, group_id="1", message_type="train"
    )
    state = SimpleNamespace(
        get_messages_legacy=lambda **_: [SimpleNamespace(metadata=metadata)],
        get_message_processing_duration=lambda **_: 1.5,
        delete_messages=lambda **_: None,
    )
    loop._push_messages(
        state=state, object_store=Store(late), send=superlink.send, push_object=superlink.push
    )


def once(happens: Callable[[SuperLink, str], None]) -> Callable[[SuperLink, str], None]:
    """Let something happen before the second part that is sent."""

    def before(superlink: SuperLink, part: str) -> None:
        if len(superlink.moved) == 2:
            happens(superlink, part)

    return before


def test_an_upload_that_nothing_disturbs_is_flower_s(monkeypatch: pytest.MonkeyPatch) -> None:
    superlink = SuperLink()
    upload(superlink, monkeypatch)
    assert superlink.held == PARTS
    assert superlink.lists == 1 and sorted(superlink.moved) == sorted(PARTS)


def test_a_part_that_arrived_without_its_answer_does_not_end_the_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    superlink = SuperLink(once(lambda link, part: link.held.update({part: PARTS[part]})))
    upload(superlink, monkeypatch)
    assert superlink.held == PARTS
    assert superlink.lists == 2
    assert superlink.moved.count("a") == 1, "what has arrived is not sent again"


@pytest.mark.parametrize("late", ["", "f"])
def test_an_upload_that_the_superlink_forgot_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    def forget(superlink: SuperLink, _: str) -> None:
        superlink.held.clear()
        superlink.before_part = lambda *_: None
        superlink.lists += 1

    superlink = SuperLink(once(forget))
    upload(superlink, monkeypatch, late)
    assert superlink.held == PARTS


def test_an_upload_that_is_refused_every_time_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: SuperLink, part: str) -> None:
        raise ObjectPushError(part, 7, "")

    superlink = SuperLink(refuse)
    upload(superlink, monkeypatch)
    assert not superlink.held
    assert AGAIN < superlink.lists <= AGAIN + 3, "parts under way may each ask once more"
