"""Answers that a server app of Flower cannot decode, or that another site is named in."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, Metadata, RecordDict

from bract.runtime.untrusted import Answers

SITE, OTHER = 7, 8


def answer(**changes: Any) -> Message:
    """What a site answers with."""
    fields: dict[str, Any] = {
        "run_id": 1,
        "message_id": "",
        "src_node_id": SITE,
        "dst_node_id": 1,
        "reply_to_message_id": "question",
        "group_id": "2",
        "created_at": 1.0,
        "ttl": 60.0,
        "message_type": "train",
    }
    content = RecordDict({"update": ArrayRecord({"w": Array(np.arange(3.0))})})
    make: Any = Message
    made: Message = make(metadata=Metadata(**(fields | changes)), content=content)
    return made


def parts_of(found: Any) -> dict[str, bytes]:
    contents = {found.object_id: found.deflate()}
    for child in (found.children or {}).values():
        contents |= parts_of(child)
    return contents


def read(sent: Any, contents: dict[str, bytes], root: str = "") -> Message:
    """Read an answer that the SuperLink has taken as the site's to the question."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    answers = Answers()
    answers.decode = inflate_object_from_contents
    name = root or sent.object_id
    taken = SimpleNamespace(**vars(answer().metadata))
    announced = {key.removeprefix("_"): value for key, value in vars(taken).items()}
    proto = SimpleNamespace(metadata=SimpleNamespace(**(announced | {"message_id": name})))
    answers.announce(SimpleNamespace(messages_list=[proto]))
    return answers.read(name, contents)


def spoilt(contents: dict[str, bytes], kind: bytes, body: bytes) -> tuple[dict[str, bytes], str]:
    """Put another body into the objects of a kind; return all of them, and the root's id."""
    names: dict[str, str] = {}
    made: dict[str, bytes] = {}
    for name, content in reversed(contents.items()):  # children first
        head, _, found = content.partition(b"\0")
        what, children, _ = head.split(b" ")
        found = body if what == kind else found
        for old, new in names.items():
            children = children.replace(old.encode(), new.encode())
        changed = b"%s %s %d\0%s" % (what, children, len(found), found)
        names[name] = hashlib.sha256(changed).hexdigest()
        made[names[name]] = changed
    return made, list(made)[-1]


def test_an_answer_is_read() -> None:
    sent = answer()
    found = read(sent, parts_of(sent))
    assert found.content == sent.content
    assert found.metadata.src_node_id == SITE


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (b"Array", b"{not json", "JSONDecodeError"),
        (b"Array", b"{}", "KeyError: 'arraychunk_ids'"),
        (b"Array", b'{"arraychunk_ids": [5]}', "IndexError"),
        (b"ArrayRecord", b"\xff", "UnicodeDecodeError"),
        (b"Message", b"\xff\xff", "DecodeError"),
    ],
)
def test_an_answer_that_cannot_be_decoded_is_its_site_s_error(
    kind: bytes, body: bytes, said: str
) -> None:
    contents, root = spoilt(parts_of(answer()), kind, body)
    found = read(None, contents, root)
    assert found.has_error()
    assert str(found.error.reason).startswith(f"sent an answer that cannot be decoded: {said}")
    assert found.metadata.src_node_id == SITE
    assert found.metadata.reply_to_message_id == "question"


def test_parts_that_are_no_message_are_refused() -> None:
    record = answer().content
    found = read(record, parts_of(record))
    assert "it is of the type RecordDict, expected Message" in str(found.error.reason)


@pytest.mark.parametrize(
    "changes",
    [{"src_node_id": OTHER}, {"reply_to_message_id": "another"}, {"run_id": 2}],
)
def test_an_answer_in_the_name_of_another_is_refused(changes: dict[str, Any]) -> None:
    sent = answer(**changes)
    found = read(sent, parts_of(sent))
    ((name, value),) = changes.items()
    assert f"its {name} is {value!r}" in str(found.error.reason)
    assert found.metadata.src_node_id == SITE
