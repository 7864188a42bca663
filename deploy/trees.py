"""A SuperLink keeps one bounded list of parts for each message, and takes no other's word for it.

A message of Flower is a tree of objects, each known by the hash of its content, and its sender
names them before their content comes. Flower's store shares an object among all messages that name
it, and believes about what it holds whichever message named it first. A site that names the
server's next records, which it can predict, with a child that never comes would thus stop every
other site; a list that names an object twice at each level would grow to 2^n objects; and a
database takes milliseconds for each object of a list, with its tables locked.

Here a message has a list of its own: the distinct ids of its parts, without what each of them
holds. Which part holds which is read from their contents, where the message is decoded. Parts with
content are shared, since content is checked against its hash. Of an answer all parts are asked for,
also those that are here from another message: else a site that names parts as it guesses them would
learn which of them the others or the server hold. An answer whose list is longer or
deeper than `MOST` and `DEEPEST`, or that is not a list of parts, or whose id is that of another
message, with which it would go and take the other's list along, never gets to the store: an error
of the site that sent it takes its place.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from bract.deploy.owners import awaited_of, is_taken, list_of, signed, uploaded_under
from bract.deploy.untrusted import error_for
from bract.errors import BractError, one_line
from bract.flower import STATES, STORES, ObjectTree, installed

MOST = 10_000
"""Objects of one answer. One of 1 GB has about 200 parts besides one object for each tensor."""

DEEPEST = 20
"""Objects within each other: of a message, a record, an array and its parts there are five."""

_ID = re.compile(r"[0-9a-f]{64}\Z")

_here = threading.local()
"""Whether this thread stores an answer of a site; without the mark, the SuperLink's own message."""

_log = logging.getLogger(__name__)


def bound_object_trees() -> None:
    """Have the stores of this SuperLink keep a list for each message, within `MOST` for answers."""
    in_memory, in_database = stores()
    keep_lists_in_memory(in_memory)
    keep_lists_in_database(in_database)
    for state in states("store_message_and_object_tree", "store_object"):
        refuse_lists(state)


def stores() -> list[Any]:
    """Return Flower's classes of stores for the parts of messages, that in memory first."""
    return _classes(
        STORES, ("delete", "delete_objects_in_run", "get", "get_object_tree", "preregister", "put")
    )


def states(*methods: str) -> list[Any]:
    """Return Flower's classes in which a SuperLink keeps messages, that in memory first."""
    return _classes(STATES, methods)


def _classes(names: tuple[tuple[str, str], ...], methods: tuple[str, ...]) -> list[Any]:
    found = []
    for module, name in names:
        made = getattr(importlib.import_module(module), name, None)
        for method in methods:
            if not callable(getattr(made, method, None)):
                raise BractError(
                    f"{module}.{name} of Flower {installed()} has no {method}: a rule of bract "
                    "would not hold, so the process does not start",
                    code="flower-version",
                )
        found.append(made)
    return found


def parts_of(tree: Any, most: int | None = None) -> list[str]:
    """Return the distinct ids of a tree of objects, each after what it holds, the root last.

    Raises
    ------
    BractError
        If it has more than ``most`` objects, counted as often as they are named, or more than
        `DEEPEST` within each other, or if an id is no SHA-256 in hexadecimal.
    """
    found: dict[str, None] = {}
    count, waiting = 0, [(tree, 1, False)]
    while waiting:
        node, depth, done = waiting.pop()
        if done:
            found.setdefault(node.object_id)
            continue
        count += 1
        if most is not None and count > most:
            raise _malformed(f"it names more than {most} objects")
        if depth > DEEPEST:
            raise _malformed(f"it names more than {DEEPEST} objects within each other")
        if not _ID.match(node.object_id):
            raise _malformed(f"it names {one_line(node.object_id, 80)!r}, which is no SHA-256")
        waiting.append((node, depth, True))
        waiting += [(child, depth + 1, False) for child in reversed(node.children)]
    found.pop(tree.object_id)
    return [*found, tree.object_id]


def _malformed(what: str) -> BractError:
    return BractError(f"sent a wrong list of the parts of its answer: {what}", code=_CODE)


_CODE = "message-malformed"


def _tree(message: str, parts: list[str]) -> Any:
    children = [ObjectTree(object_id=part) for part in parts if part != message]
    return ObjectTree(object_id=message, children=children)


def _bound() -> int | None:
    return MOST if getattr(_here, "answer", False) else None


def keep_lists_in_memory(store: Any) -> None:
    """Have a class of stores in memory keep one list of parts for each message."""
    register: Callable[[Any, int, Any], list[str]] = store.preregister
    build: Callable[[Any, str], Any] = store.get_object_tree

    def preregister(self: Any, run_id: int, object_tree: Any) -> list[str]:
        parts, key = parts_of(object_tree, _bound()), list_of(object_tree.object_id)
        with self.lock_store:
            known = self.store.get(key)
            if known is not None and known.child_object_ids != parts:
                if _bound() is None:
                    drop(self, key)
                else:
                    parts = known.child_object_ids
            flat = [ObjectTree(object_id=part) for part in parts]
            missing = register(self, run_id, ObjectTree(object_id=key, children=flat))
            if _bound() is not None:
                if known is None:
                    awaited(self)[key] = set(parts)
                missing = [part for part in parts if part in awaited(self).get(key, ())]
        return [part for part in missing if part != key]

    def awaited(self: Any) -> dict[str, set[str]]:
        held: dict[str, set[str]] = vars(self).setdefault("_bract_awaited", {})
        return held

    def arrived(self: Any, message: str, part: str) -> None:
        with self.lock_store:
            awaited(self).get(list_of(message), set()).discard(part)

    def get_object_tree(self: Any, object_id: str) -> Any:
        with self.lock_store:
            known = self.store.get(list_of(object_id))
        if known is None:
            return build(self, list_of(object_id))  # which raises that it is not there
        return _tree(object_id, known.child_object_ids)

    def delete(self: Any, object_id: str) -> None:
        with self.lock_store:
            drop(self, list_of(object_id))

    def delete_objects_in_run(self: Any, run_id: int) -> None:
        with self.lock_store:
            for name in list(self.run_objects_mapping.get(run_id, ())):
                if not _ID.match(name):
                    drop(self, name)
            self.run_objects_mapping.pop(run_id, None)

    def drop(self: Any, key: str) -> None:
        entry = self.store.get(key)
        if entry is None:
            return
        remove(self, key)
        awaited(self).pop(key, None)
        for part in entry.child_object_ids:
            self.store[part].ref_count -= 1
            if self.store[part].ref_count == 0:
                remove(self, part)

    def remove(self: Any, name: str) -> None:
        for run in self.store.pop(name).runs:
            self.run_objects_mapping.get(run, set()).discard(name)

    store.preregister, store.get_object_tree = preregister, get_object_tree
    store.delete, store.delete_objects_in_run = delete, delete_objects_in_run
    store.arrived = arrived


def keep_lists_in_database(store: Any) -> None:
    """Have a class of stores in a database keep one list of parts for each message.

    Each list takes a fixed number of statements, however many parts it names: Flower's takes four
    statements for each part.
    """
    build: Callable[[Any, str], Any] = store.get_object_tree

    def preregister(self: Any, run_id: int, object_tree: Any) -> list[str]:
        parts, key = parts_of(object_tree, _bound()), list_of(object_tree.object_id)
        with self._mutation_session() as session:
            run = session.connection().exec_driver_sql
            known = listed(run, key)
            if known and set(known) != set(parts):
                if _bound() is None:
                    drop(run, key)
                    known = []
                else:
                    parts = known
            if not known:
                run(_INDEX)
                put = "INSERT INTO objects (object_id, content) VALUES (?, x'')"
                run(f"{put} ON CONFLICT DO NOTHING", [(name,) for name in (*parts, key)])
                run(
                    "INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)",
                    [(key, part) for part in parts],
                )
                run(f"UPDATE objects SET ref_count = ref_count + 1 WHERE {_PARTS}", (key,))
                if _bound() is not None:
                    wait(run, awaited_of(object_tree.object_id), parts)
            run(
                "INSERT INTO run_objects (run_id, object_id) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (signed(run_id), key),
            )
            if _bound() is None:
                lacking = f"SELECT object_id FROM objects WHERE is_available = 0 AND {_PARTS}"
                missing = {name for (name,) in run(lacking, (key,))}
            else:
                missing = set(listed(run, awaited_of(object_tree.object_id)))
        return [part for part in parts if part in missing]

    def get_object_tree(self: Any, object_id: str) -> Any:
        with self.session() as session:
            known = listed(session.connection().exec_driver_sql, list_of(object_id))
        if not known:
            return build(self, list_of(object_id))  # which raises that it is not there
        return _tree(object_id, known)

    def delete(self: Any, object_id: str) -> None:
        with self._mutation_session() as session:
            drop(session.connection().exec_driver_sql, list_of(object_id))

    def delete_objects_in_run(self: Any, run_id: int) -> None:
        with self._mutation_session() as session:
            run = session.connection().exec_driver_sql
            keys = run("SELECT object_id FROM run_objects WHERE run_id = ?", (signed(run_id),))
            for (key,) in list(keys):
                drop(run, key)
            run("DELETE FROM run_objects WHERE run_id = ?", (signed(run_id),))

    def listed(run: Any, key: str) -> list[str]:
        found = run(
            "SELECT child_id FROM object_children WHERE parent_id = ? ORDER BY rowid", (key,)
        )
        return [name for (name,) in found]

    def wait(run: Any, key: str, parts: list[str]) -> None:
        run(
            "INSERT INTO objects (object_id, content) VALUES (?, x'') ON CONFLICT DO NOTHING",
            (key,),
        )
        run(
            "INSERT INTO object_children (parent_id, child_id) VALUES (?, ?)",
            [(key, part) for part in parts],
        )

    def arrived(self: Any, message: str, part: str) -> None:
        with self._mutation_session() as session:
            session.connection().exec_driver_sql(
                "DELETE FROM object_children WHERE parent_id = ? AND child_id = ?",
                (awaited_of(message), part),
            )

    def drop(run: Any, key: str) -> None:
        for table, column in (("object_children", "parent_id"), ("objects", "object_id")):
            run(f"DELETE FROM {table} WHERE {column} = ?", (awaited_of(key),))
        run(f"UPDATE objects SET ref_count = ref_count - 1 WHERE {_PARTS}", (key,))
        run(f"DELETE FROM objects WHERE ref_count <= 0 AND {_PARTS}", (key,))
        for table, column in (
            ("object_children", "parent_id"),
            ("run_objects", "object_id"),
            ("objects", "object_id"),
        ):
            run(f"DELETE FROM {table} WHERE {column} = ?", (key,))

    store.preregister, store.get_object_tree = preregister, get_object_tree
    store.delete, store.delete_objects_in_run = delete, delete_objects_in_run
    store.arrived = arrived


_INDEX = "CREATE INDEX IF NOT EXISTS bract_children ON object_children (child_id)"
"""Without it, a database reads all lists for each part that it deletes."""

_PARTS = "object_id IN (SELECT child_id FROM object_children WHERE parent_id = ?)"


def refuse_lists(state: Any) -> None:
    """Have a class of states store an error of its sender in the place of a malformed answer."""
    begin: Callable[[Any, Any, Any, str], tuple[bool, list[str]]]
    begin = state.store_message_and_object_tree
    store: Callable[..., bool] = state.store_object

    def store_message_and_object_tree(
        self: Any, message: Any, object_tree: Any, session_id: str
    ) -> tuple[bool, list[str]]:
        metadata = message.metadata
        if not metadata.reply_to_message_id:
            return begin(self, message, object_tree, session_id)
        try:
            parts_of(object_tree, MOST)
            if object_tree.object_id != metadata.message_id:
                raise _malformed(f"it is that of another message, {object_tree.object_id[:12]}...")
            if is_taken(self, metadata):
                raise _malformed(f"{metadata.message_id[:12]}... is the id of another message")
        except BractError as error:
            _log.warning("node %d %s", metadata.src_node_id, error)
            return refuse(self, metadata, str(error), session_id)
        _here.answer = True
        try:
            return begin(self, message, object_tree, session_id)
        finally:
            _here.answer = False

    def refuse(self: Any, metadata: Any, why: str, session_id: str) -> tuple[bool, list[str]]:
        made = error_for(metadata, why)
        root, content = made.metadata.message_id, made.deflate()
        stored, missing = begin(self, made, ObjectTree(object_id=root), session_id)
        if stored and missing:
            self.store_object(metadata.run_id, session_id, root, content)
        return stored, []

    def store_object(
        self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        answers = uploaded_under(self, session_id)
        stored = store(self, run_id, session_id, object_id, object_content)
        for answer in (root for root, sender in answers.items() if stored and sender is not None):
            self.object_store.arrived(answer, object_id)
        return stored

    state.store_message_and_object_tree = store_message_and_object_tree
    state.store_object = store_object
