"""A SuperLink hands on an answer once all of its parts have arrived."""

import threading
import time

import pytest
from flwr.app import Message
from ruling import held, put
from superlinks import IN_MEMORY, SQL, SuperLink, restore_afterwards

from bract.installed import flower
from bract.runtime import arriving


@pytest.fixture
def _ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    restore_afterwards(monkeypatch)
    put(monkeypatch, "flower-superlink", arriving.RULE)


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
@pytest.mark.parametrize("database", [IN_MEMORY, SQL])
def test_an_upload_that_rests_for_long_is_the_error_of_its_site(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink = SuperLink(database)
    question, later = superlink.ask("gone"), superlink.ask("later")
    upload = superlink.answer(question)
    upload.go_on(1)
    assert superlink.answered(question) == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + arriving.REST + 1)
    superlink.answer(later).go_on()
    (error,) = superlink.answers(question)
    (content,) = superlink.fetch(error).values()
    assert content is not None
    found = Message.inflate(content)
    assert found.metadata.src_node_id == question.metadata.dst_node_id
    assert found.metadata.reply_to_message_id == question.metadata.message_id
    assert f"{len(upload.parts)} of its parts" in str(found.error.reason)


@pytest.mark.usefixtures("_ruled")
@pytest.mark.parametrize("database", [IN_MEMORY, SQL])
def test_to_list_parts_again_sends_none(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink = SuperLink(database)
    question = superlink.ask("never rests")
    upload = superlink.answer(question)
    monkeypatch.setattr(arriving, "REST", 0.1)
    time.sleep(0.2)
    upload.list()
    (error,) = superlink.answers(question)
    (content,) = superlink.fetch(error).values()
    assert content is not None
    lacking = f"{len(upload.parts)} of its parts"
    assert lacking in str(Message.inflate(content).error.reason)


def test_an_answer_that_comes_while_answers_are_handed_on_waits_for_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore_afterwards(monkeypatch)
    state = held(flower.STATE)
    hand_on, came = state.get_message_res, threading.Event()

    def hand_on_later(self: object, message_ids: set[str], run_id: int) -> object:
        threading.Thread(target=come).start()
        came.wait(0.5)
        return hand_on(self, message_ids, run_id)

    def come() -> None:
        superlink.answer(question)
        came.set()

    monkeypatch.setattr(state, "get_message_res", hand_on_later)
    put(monkeypatch, "flower-superlink", arriving.RULE)
    superlink = SuperLink(IN_MEMORY)
    question = superlink.ask("evil")
    assert superlink.answered(question) == []
    assert came.wait(10)
