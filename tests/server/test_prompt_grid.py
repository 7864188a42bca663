"""Messages that a SuperLink lost a part of are sent again."""

from collections.abc import Iterable
from typing import Any, cast

import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from bract.server.grid import PUSHES, PromptGrid


class Restarting:
    """A grid whose SuperLink is restarted in the first ``failures`` pushes."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.pushed: list[list[Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.pushed.append(list(messages))
        if len(self.pushed) <= self.failures:
            raise ObjectPushError("a", 1, "session")
        return ["id"]

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        assert set(ids) == {"id"}
        return [type("Reply", (), {"metadata": type("M", (), {"reply_to_message_id": "id"})})]


def test_the_same_messages_are_pushed_again_where_the_superlink_was_restarted() -> None:
    restarting = Restarting(2)
    message = cast(Message, object())
    grid = PromptGrid(cast(Any, restarting), poll_interval=0.0)
    assert len(list(grid.send_and_receive(iter([message])))) == 1
    assert [list(map(id, pushed)) for pushed in restarting.pushed] == [[id(message)]] * 3


def test_a_superlink_that_never_takes_them_ends_the_run() -> None:
    restarting = Restarting(99)
    grid = PromptGrid(cast(Any, restarting), poll_interval=0.0)
    with pytest.raises(ObjectPushError):
        grid.send_and_receive([cast(Message, object())])
    assert len(restarting.pushed) == PUSHES


def test_another_error_ends_the_run_at_once() -> None:
    """It is no fault of the SuperLink, and pushing again would change nothing."""

    class Broken(Restarting):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            self.pushed.append(list(messages))
            raise ValueError("a message without content")

    broken = Broken(1)
    with pytest.raises(ValueError, match="content"):
        PromptGrid(cast(Any, broken), poll_interval=0.0).push_messages([cast(Message, object())])
    assert len(broken.pushed) == 1
