"""Questions that a server of Flower holds until there is an answer."""

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ruling import held, put

from bract.installed import flower
from bract.runtime import long_polling, parts

fleet_pb2 = importlib.import_module("flwr.proto.fleet_pb2")
message_pb2 = importlib.import_module("flwr.proto.message_pb2")

LONG = 60.0


def test_a_question_is_answered_once_something_arrives() -> None:
    changes, there, looked = long_polling.Changes(), list[str](), threading.Event()
    answers: list[Any] = []

    def look() -> list[str]:
        looked.set()
        return list(there)

    asking = threading.Thread(
        target=lambda: answers.append(changes.hold(look, bool, LONG)), daemon=True
    )
    asking.start()
    assert looked.wait(LONG)
    assert not answers
    there.append("message")
    changes.note()
    asking.join(LONG / 2)
    assert answers == [["message"]]


@pytest.mark.parametrize(("held", "seconds"), [(1, 0.0), (0, LONG)])
def test_a_question_is_answered_at_once_where_no_more_are_held(held: int, seconds: float) -> None:
    looks: list[int] = []
    changes = long_polling.Changes(held)
    assert changes.hold(lambda: looks.append(1), bool, seconds) is None
    assert looks == [1]


def test_a_task_is_looked_for_where_nothing_announces_it() -> None:
    answers = iter(["", "", "task"])
    assert long_polling.Changes().hold(lambda: next(answers), bool, LONG, every=0.0) == "task"


def test_what_is_there_is_given_at_once() -> None:
    assert long_polling.Changes(0).hold(lambda: "task", bool, LONG) == "task"


def test_a_superlink_answers_a_supernode_when_the_last_part_of_a_message_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, runtime = held(flower.FLEET), held(flower.LINK_RUNTIME)
    monkeypatch.setattr(long_polling, "HOLD", LONG)
    there, looked = list[str](), threading.Event()

    def pull(**_: Any) -> Any:
        looked.set()
        return SimpleNamespace(messages_list=list(there))

    monkeypatch.setattr(fleet, "pull_messages", pull)
    for module in (fleet, runtime):
        monkeypatch.setattr(module, "push_object", lambda **_: None)
    for name in ("pull_messages", "acquire_task"):
        monkeypatch.setattr(runtime, name, lambda **_: None)
    put(monkeypatch, "flower-superlink", long_polling.HELD_AT_LINK)
    asked = fleet_pb2.PullMessagesRequest()
    assert fleet.pull_messages(request=asked, state=None, store=None).messages_list == []
    parts._append(asked, b"")  # one of ours, whose question is held
    looked.clear()
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            fleet.pull_messages(request=asked, state=None, store=None).messages_list
        ),
        daemon=True,
    )
    asking.start()
    assert looked.wait(LONG)
    there.append("message")
    part = message_pb2.PushObjectRequest()
    runtime.push_object(part, None, None)
    asking.join(0.2)
    assert not answers, "another part is to come"
    parts._append(part, b"")
    runtime.push_object(part, None, None)
    asking.join(LONG / 2)
    assert answers == [["message"]]


def test_a_server_app_waits_that_asks_again_and_not_one_that_looks_for_late_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(long_polling, "time", SimpleNamespace(monotonic=lambda: now[0]))
    repeats = long_polling.Repeats()
    assert not repeats.again({"late"})
    assert not repeats.again({"a", "b"})
    now[0] += 0.2
    assert repeats.again({"a", "b"})
    assert repeats.again({"b"}), "the other was answered"
    now[0] += 5.0
    assert not repeats.again({"b"})
