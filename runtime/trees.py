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

import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from bract.errors import BractError, one_line
from bract.installed.flower import STATES, STORE, STORES, place
from bract.runtime.owners import PLACES, awaited_of, is_taken, list_of, signed, uploaded_under
from bract.runtime.rule import Layer, Rule
from bract.runtime.untrusted import error_for

MOST = 10_000
"""Objects of one answer. One of 1 GB has about 200 parts besides one object for each tensor."""

DEEPEST = 20
"""Objects within each other: of a message, a record, an array and its parts there are five."""

_ID = re.compile(r"[0-9a-f]{64}\Z")

_here = threading.local()
"""Whether this thread stores an answer of a site; without the mark, the SuperLink's own message."""

_log = logging.getLogger(__name__)


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
    from bract.installed.flower import ObjectTree

    children = [ObjectTree(object_id=part) for part in parts if part != message]
    return ObjectTree(object_id=message, children=children)


def _bound() -> int | None:
    return MOST if getattr(_here, "answer", False) else None


def lists_in_memory() -> Mapping[str, Layer]:
    """Return layers by which a store in memory keeps one list of parts for each message."""

    def registering(register: Callable[[Any, int, Any], list[str]]) -> Callable[..., list[str]]:
        from bract.installed.flower import ObjectTree

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
                        _awaited(self)[key] = set(parts)
                    missing = [part for part in parts if part in _awaited(self).get(key, ())]
            return [part for part in missing if part != key]

        return preregister

    def building(build: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get_object_tree(self: Any, object_id: str) -> Any:
            with self.lock_store:
                known = self.store.get(list_of(object_id))
            if known is None:
                return build(self, list_of(object_id))  # which raises that it is not there
            return _tree(object_id, known.child_object_ids)

        return get_object_tree

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
        _awaited(self).pop(key, None)
        for part in entry.child_object_ids:
            self.store[part].ref_count -= 1
            if self.store[part].ref_count == 0:
                remove(self, part)

    def remove(self: Any, name: str) -> None:
        for run in self.store.pop(name).runs:
            self.run_objects_mapping.get(run, set()).discard(name)

    return {
        f"{STORE}.preregister": registering,
        f"{STORE}.get_object_tree": building,
        f"{STORE}.delete": lambda _: delete,
        f"{STORE}.delete_objects_in_run": lambda _: delete_objects_in_run,
    }


def _awaited(store: Any) -> dict[str, set[str]]:
    """Return the parts that senders have yet to send, by the list of a store in memory."""
    held: dict[str, set[str]] = vars(store).setdefault("_bract_awaited", {})
    return held


def _arrived(store: Any, message: str, part: str) -> None:
    """Note in a store that a part of a message has arrived."""
    if hasattr(store, "lock_store"):
        with store.lock_store:
            _awaited(store).get(list_of(message), set()).discard(part)
        return
    with store._mutation_session() as session:
        session.connection().exec_driver_sql(
            "DELETE FROM object_children WHERE parent_id = ? AND child_id = ?",
            (awaited_of(message), part),
        )


def lists_in_database() -> Mapping[str, Layer]:
    """Return layers by which a store in a database keeps one list of parts for each message.

    Each list takes a fixed number of statements, however many parts it names: Flower's takes four
    statements for each part.
    """

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

    def building(build: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get_object_tree(self: Any, object_id: str) -> Any:
            with self.session() as session:
                known = listed(session.connection().exec_driver_sql, list_of(object_id))
            if not known:
                return build(self, list_of(object_id))  # which raises that it is not there
            return _tree(object_id, known)

        return get_object_tree

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

    kept = STORES[1]
    return {
        f"{kept}.preregister": lambda _: preregister,
        f"{kept}.get_object_tree": building,
        f"{kept}.delete": lambda _: delete,
        f"{kept}.delete_objects_in_run": lambda _: delete_objects_in_run,
    }


_INDEX = "CREATE INDEX IF NOT EXISTS bract_children ON object_children (child_id)"
"""Without it, a database reads all lists for each part that it deletes."""

_PARTS = "object_id IN (SELECT child_id FROM object_children WHERE parent_id = ?)"


_Begin = Callable[[Any, Any, Any, str], tuple[bool, list[str]]]


def _refusing(begin: _Begin) -> _Begin:
    """Have a class of states store an error of its sender in the place of a malformed answer."""
    from bract.installed.flower import ObjectTree

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

    return store_message_and_object_tree


def _noting_parts(store: Callable[..., bool]) -> Callable[..., bool]:
    def store_object(
        self: Any, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        answers = uploaded_under(self, session_id)
        stored = store(self, run_id, session_id, object_id, object_content)
        for answer in (root for root, sender in answers.items() if stored and sender is not None):
            _arrived(self.object_store, answer, object_id)
        return stored

    return store_object


def _put(_: str) -> Mapping[str, Layer]:
    return {
        **lists_in_memory(),
        **lists_in_database(),
        **{f"{state}.store_message_and_object_tree": _refusing for state in STATES},
        **{f"{state}.store_object": _noting_parts for state in STATES},
    }


_STORE_METHODS = (
    "preregister(run_id, object_tree)",
    "get_object_tree(object_id)",
    "delete(object_id)",
    "delete_objects_in_run(run_id)",
)
_STATE_METHODS = (
    "store_message_and_object_tree(message, object_tree, session_id)",
    "store_object(run_id, session_id, object_id, object_content)",
)

RULE = Rule(
    name="bounded lists",
    kind="security",
    commands=("flower-superlink",),
    needs=(
        *(f"{store}.{method}" for store in STORES for method in _STORE_METHODS),
        *(f"{state}.{method}" for state in STATES for method in _STATE_METHODS),
        *(f"{STORE}.{name}" for name in ("store", "lock_store", "run_objects_mapping")),
        *(f"{STORES[1]}.{name}" for name in ("session", "_mutation_session")),
        *PLACES,
        f"{place('ObjectTree')}(object_id, children)",
    ),
    does="Each message has a bounded list of parts of its own, so that a site's list touches no "
    "other's message and keeps no SuperLink busy; a malformed list is its site's error.",
    without="a site could stop the messages of every other with a list of parts",
    after=("whole answers",),
    put=_put,
)
