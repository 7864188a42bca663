"""A SuperLink builds no tree of objects that is more than its sender wrote down."""

import hashlib
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory

from bract.deploy import trees
from bract.flower import STORES


@pytest.fixture(params=[":flwr-in-memory:", ":memory:"])
def store(request: pytest.FixtureRequest) -> Any:
    return bounded(request.param)


def bounded(database: str) -> Any:
    """A store of Flower's under the rule, of a class of its own."""
    made: Any = ObjectStoreFactory(database).store()
    ruled = type("Ruled", (type(made),), {})
    trees.bound(ruled)
    made.__class__ = ruled
    return made


def named(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_a_message_comes_back_as_it_was_written_down(store: Any) -> None:
    arrays = ArrayRecord({name: Array(np.arange(3.0) + n) for n, name in enumerate("ab")})
    written = get_object_tree(RecordDict({"update": arrays}))
    store.preregister(1, written)
    built = store.get_object_tree(written.object_id)
    assert {n.object_id for n in iterate_object_tree(built)} == {
        n.object_id for n in iterate_object_tree(written)
    }


def test_an_object_that_is_named_twice_a_level_does_not_double_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen levels, each with the one below and that one again without what it holds."""
    store = bounded(":flwr-in-memory:")
    monkeypatch.setattr(trees, "MOST", 1000)
    tree = ObjectTree(object_id=named(0))
    for level in range(1, 17):
        again = ObjectTree(object_id=tree.object_id)
        tree = ObjectTree(object_id=named(level), children=[tree, again])
    assert tree.ByteSize() < 20_000
    store.preregister(1, tree)
    with pytest.raises(NoObjectInStoreError, match="more than 1000 objects"):
        store.get_object_tree(tree.object_id)
    below = store.get_object_tree(named(3))
    assert sum(1 for _ in iterate_object_tree(below)) <= 2**4


def test_lists_that_name_each_other_go_no_deeper_than_messages_do(store: Any) -> None:
    tree = ObjectTree(object_id=named(0))
    for level in range(1, trees.DEEPEST + 1):
        tree = ObjectTree(object_id=named(level), children=[tree])
    store.preregister(1, tree)
    store.get_object_tree(named(trees.DEEPEST - 1))
    with pytest.raises(NoObjectInStoreError, match=f"more than {trees.DEEPEST} within"):
        store.get_object_tree(tree.object_id)
    store.get_object_tree(named(trees.DEEPEST - 1))


def test_a_missing_object_is_named(store: Any) -> None:
    with pytest.raises(NoObjectInStoreError, match="was not pre-registered"):
        store.get_object_tree(named(1))


def test_every_store_of_flower_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(trees, "bound", lambda store: found.append(store.__name__))
    trees.bound_object_trees()
    assert found == [name for _, name in STORES]
