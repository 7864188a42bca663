"""A SuperLink keeps one bounded list of parts for each message, as its own sender wrote it down."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from refusals import refused
from ruling import held, put
from superlinks import IN_MEMORY, SQL, SuperLink, restore_afterwards

from bract.installed import flower
from bract.runtime import arriving, parts_on_disk, trees

DATABASES = pytest.mark.parametrize("database", [IN_MEMORY, SQL])


@pytest.fixture(autouse=True)
def _ruled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    restore_afterwards(monkeypatch)
    put(monkeypatch, "flower-superlink", arriving.RULE, trees.RULE)
    yield


@pytest.fixture(params=[IN_MEMORY, SQL])
def store(request: pytest.FixtureRequest) -> Any:
    return ObjectStoreFactory(request.param).store()


def named(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chain(length: int) -> ObjectTree:
    tree = ObjectTree(object_id=named(0))
    for level in range(1, length):
        tree = ObjectTree(object_id=named(level), children=[tree])
    return tree


def flat(root: str, *parts: str) -> ObjectTree:
    return ObjectTree(object_id=root, children=[ObjectTree(object_id=part) for part in parts])


def asked_next() -> RecordDict:
    """What the server asks all sites in its next round, as each of them can tell beforehand."""
    model = ArrayRecord({"w": Array(np.arange(4.0))})
    return RecordDict({"arrays": model, "config": ConfigRecord({"round": 2})})


@DATABASES
def test_a_claim_about_the_next_records_stops_no_other_site(database: str) -> None:
    superlink = SuperLink(database)
    first, honest = superlink.ask("evil"), superlink.node("honest")
    claimed = [flat(part, named(1)) for part in get_all_nested_objects(asked_next())]
    reply = superlink.reply(first, RecordDict({"metrics": ConfigRecord({"n": 1})}))
    root = ObjectTree(object_id=reply.object_id, children=claimed)
    superlink.list(reply, root)

    question = superlink.question(honest, asked_next())
    superlink.send(question)
    received = superlink.fetch(question)
    assert received == {n: o.deflate() for n, o in get_all_nested_objects(question).items()}
    superlink.send(superlink.reply(question, RecordDict({"update": ArrayRecord()})))
    assert superlink.answered(first, question) == [question.metadata.message_id]


@DATABASES
def test_an_answer_under_the_name_of_the_next_record_stops_no_other_site(database: str) -> None:
    superlink = SuperLink(database)
    first, honest = superlink.ask("evil"), superlink.node("honest")
    reply = superlink.reply(first, RecordDict())
    for part in get_all_nested_objects(asked_next()):
        reply.metadata.__dict__["_message_id"] = part
        session = superlink.state.start_session(superlink.run)
        superlink.state.store_message_and_object_tree(reply, flat(part, named(1)), session)
    question = superlink.question(honest, asked_next())
    superlink.send(question)
    assert all(superlink.fetch(question).values())


@DATABASES
def test_a_server_s_message_is_sent_again_whatever_a_site_names_like_it(database: str) -> None:
    superlink = SuperLink(database)
    question = superlink.question(superlink.node("evil"), asked_next())
    superlink.send(question)
    superlink.state.object_store.delete(question.metadata.message_id)  # it has been received
    reply = superlink.reply(question, RecordDict())
    reply.metadata.__dict__["_message_id"] = root = question.metadata.message_id
    session = superlink.state.start_session(superlink.run)
    superlink.state.store_message_and_object_tree(reply, flat(root, named(1)), session)
    superlink.send(question)
    assert all(superlink.fetch(question).values())


@DATABASES
def test_a_part_stays_until_the_last_message_that_has_it_is_gone(database: str) -> None:
    superlink = SuperLink(database)
    questions = [superlink.question(superlink.node(name), asked_next()) for name in "ab"]
    for question in questions:
        superlink.send(question)
    store = superlink.state.object_store
    store.delete(questions[0].metadata.message_id)
    assert all(superlink.fetch(questions[1]).values())
    with pytest.raises(NoObjectInStoreError):
        superlink.fetch(questions[0])
    shared = list(get_all_nested_objects(asked_next()))
    store.delete(shared[0])  # no message, so nothing goes
    assert all(superlink.fetch(questions[1]).values())
    store.delete_objects_in_run(superlink.run)
    assert len(store) == 0


@DATABASES
def test_a_site_learns_of_no_part_whether_another_message_holds_it(database: str) -> None:
    superlink = SuperLink(database)
    secret = RecordDict({"update": ArrayRecord({"w": Array(np.full(4, 0.5))})})
    honest, curious = superlink.ask("honest"), superlink.ask("curious")
    superlink.send(superlink.reply(honest, secret))
    held = set(get_all_nested_objects(secret))
    guess = superlink.reply(curious, secret)
    for _ in range(2):
        session, missing = superlink.list(guess)
        assert held <= set(missing)
    objects = get_all_nested_objects(guess)
    first, *rest = missing
    assert superlink.state.store_object(superlink.run, session, first, objects[first].deflate())
    session, missing = superlink.list(guess)
    assert set(missing) == set(rest)
    assert not superlink.answered(curious)
    for part in missing:
        content = objects[part].deflate()
        assert superlink.state.store_object(superlink.run, session, part, content)
    assert superlink.answered(honest, curious)
    superlink.state.object_store.delete_objects_in_run(superlink.run)
    assert len(superlink.state.object_store) == 0


LISTS = {
    "too long": (flat(named(0), *map(named, range(1, 40))), 30),
    "the same part again and again": (flat(named(0), *([named(1)] * 40)), 30),
    "too deep": (chain(trees.DEEPEST + 1), trees.DEEPEST),
    "no hash": (flat(named(0), "../../etc/passwd"), "../../etc/passwd"),
}


@DATABASES
@pytest.mark.parametrize("case", LISTS)
def test_a_list_beyond_the_bounds_is_the_error_of_the_site_that_sent_it(
    database: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST", 30)
    tree, value = LISTS[case]
    superlink = SuperLink(database)
    evil, honest = superlink.ask("evil"), superlink.ask("honest")
    reply = superlink.reply(evil, RecordDict())
    reply.metadata.__dict__["_message_id"] = tree.object_id
    session = superlink.state.start_session(superlink.run)
    stored = superlink.state.store_message_and_object_tree(reply, tree, session)
    assert stored == (True, [])
    superlink.answer(honest).go_on()
    found = {m.metadata.src_node_id: m for m in superlink.answers(evil, honest)}
    error = found[evil.metadata.dst_node_id]
    assert set(found) == {q.metadata.dst_node_id for q in (evil, honest)}
    (content,) = superlink.fetch(error).values()
    assert content is not None
    inflated = Message.inflate(content)
    assert str(value) in str(inflated.error.reason)
    assert inflated.metadata.src_node_id == evil.metadata.dst_node_id


@DATABASES
def test_a_list_for_another_message_is_the_error_of_its_site(database: str) -> None:
    superlink = SuperLink(database)
    question = superlink.ask("evil")
    reply = superlink.reply(question, RecordDict())
    assert superlink.list(reply, flat(named(0), named(1)))[1] == []
    (error,) = superlink.answers(question)
    (content,) = superlink.fetch(error).values()
    assert content is not None and named(0)[:12] in str(Message.inflate(content).error.reason)


@DATABASES
def test_a_second_list_for_an_answer_changes_nothing(database: str) -> None:
    superlink = SuperLink(database)
    question = superlink.ask("evil")
    reply = superlink.reply(question, RecordDict())
    first = superlink.list(reply)[1]
    root = reply.object_id
    assert superlink.list(reply, flat(root, *map(named, range(9))))[1] == first
    assert named(1) not in superlink.state.object_store


def test_the_server_s_own_list_may_be_longer(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST", 5)
    assert len(store.preregister(1, flat(named(0), *map(named, range(1, 9))))) == 9


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")
def test_thousands_of_parts_hold_a_database_for_moments(tmp_path: Path) -> None:
    store = ObjectStoreFactory(str(tmp_path / "state.db")).store()
    parts = [named(number) for number in range(trees.MOST)]
    began = time.process_time()
    missing = store.preregister(1, flat(named(-1), *parts))
    assert missing == [*parts, named(-1)]
    assert store.preregister(1, flat(named(-1), *parts)) == missing
    store.delete(named(-1))
    assert len(store) == 0
    assert time.process_time() - began < 20.0  # Flower's store takes minutes


def test_a_message_comes_back_as_it_was_written_down(store: Any) -> None:
    arrays = ArrayRecord({name: Array(np.arange(3.0) + n) for n, name in enumerate("ab")})
    written = get_object_tree(RecordDict({"update": arrays}))
    missing = store.preregister(1, written)
    built = store.get_object_tree(written.object_id)
    order = [node.object_id for node in iterate_object_tree(built)]
    assert order == [node.object_id for node in iterate_object_tree(written)] == missing


def test_an_object_that_is_named_twice_a_level_does_not_double_the_work(store: Any) -> None:
    """Each of a few levels with the one below, and that one again without what it holds."""
    tree = ObjectTree(object_id=named(0))
    for level in range(1, trees.DEEPEST):
        again = ObjectTree(object_id=tree.object_id)
        tree = ObjectTree(object_id=named(level), children=[tree, again])
    store.preregister(1, tree)
    built = store.get_object_tree(tree.object_id)
    assert sum(1 for _ in iterate_object_tree(built)) == trees.DEEPEST


def test_a_list_that_is_too_deep_gets_to_no_store(store: Any) -> None:
    with refused("message-malformed", str(trees.DEEPEST)):
        store.preregister(1, chain(trees.DEEPEST + 1))
    assert len(store) == 0


def test_a_missing_object_is_named(store: Any) -> None:
    with pytest.raises(NoObjectInStoreError, match=named(1)[1:]):
        store.get_object_tree(named(1))


def test_large_parts_on_disk_go_with_the_last_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = ObjectStoreFactory(IN_MEMORY).store()
    monkeypatch.setenv(parts_on_disk.FOLDER, str(tmp_path))
    put(monkeypatch, "flower-superlink", parts_on_disk.RULE)
    made.verify = False
    content = bytes(parts_on_disk.SMALLEST)
    part = hashlib.sha256(content).hexdigest()
    for root in (named(1), named(2)):
        made.preregister(1, flat(root, part))
    made.put(part, content)
    made.delete(named(1))
    assert isinstance(made.store[part].content, parts_on_disk.Part) and made.get(part) == content
    made.delete(named(2))
    assert made.get(part) is None


def test_every_store_of_flower_is_bounded() -> None:
    for store in flower.STORES:
        assert held(store).preregister.__module__ == trees.__name__
