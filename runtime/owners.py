"""Whose message is whose, as a SuperLink's own state tells it, in memory and in a database.

A question belongs to the node that it is addressed to, an answer to the node that was asked. What a
node says about itself in a request beside its signed name counts for nothing here.
"""

from __future__ import annotations

from typing import Any

from bract.installed.flower import STATE, STATES, STORE, STORES

PLACES = (
    *(
        f"{STATE}.{name}"
        for name in (
            "lock",
            "message_ins_store",
            "message_res_store",
            "message_ins_id_to_message_res_id",
            "_object_push_sessions",
            "_lock_object_push_sessions",
        )
    ),
    *(f"{STORE}.{name}" for name in ("lock_store", "store")),
    f"{STATES[1]}.session",
    f"{STORES[1]}.session",
)
"""Places of Flower that this module reads."""


def list_of(message: str) -> str:
    """Return the id under which the list of a message's parts is stored, which no part can have."""
    return "+" + message[1:]


def awaited_of(message: str) -> str:
    """Return the id under which the parts are stored that a message's sender has yet to send."""
    return "-" + message[1:]


def signed(number: int) -> int:
    """Return a number of 64 bits as a database holds it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def questions_to(state: Any, node: int) -> list[str]:
    """Return the ids of the messages that are addressed to a node and not answered yet."""
    if _in_memory(state):
        with state.lock:
            asked = state.message_ins_store.items()
            return [name for name, message in asked if message.metadata.dst_node_id == node]
    with state.session() as session:
        found = session.connection().exec_driver_sql(
            "SELECT message_id FROM message_ins WHERE dst_node_id = ?", (signed(node),)
        )
        return [name for (name,) in found]


def may_read(state: Any, node: int, part: str) -> bool:
    """Return whether a message that is addressed to a node has a part; the lists are the server
    app's.
    """
    store, keys = state.object_store, map(list_of, questions_to(state, node))
    if hasattr(store, "lock_store"):
        with store.lock_store:
            lists = [store.store[key].child_object_ids for key in keys if key in store.store]
        return any(part in parts for parts in lists)
    with store.session() as session:
        run = session.connection().exec_driver_sql
        which = "object_children WHERE parent_id = ? AND child_id = ?"
        return any(_exists(run, which, key, part) for key in keys)


def uploaded_under(state: Any, session: str) -> dict[str, int | None]:
    """Return the answers whose parts go by the name of an upload, with the nodes that sent them.

    A node is None where the answer is not stored yet, as while its list is taken.
    """
    if _in_memory(state):
        with state._lock_object_push_sessions:
            upload = state._object_push_sessions.get(session)
            roots = set(upload.root_object_ids) if upload is not None else set()
        with state.lock:
            answers = {root: state.message_res_store.get(root) for root in roots}
        return {root: a.metadata.src_node_id if a else None for root, a in answers.items()}
    with state.session() as held:
        found = held.connection().exec_driver_sql(
            "SELECT root_object_id, src_node_id FROM object_push_session_roots LEFT JOIN "
            "message_res ON message_id = root_object_id WHERE session_id = ?",
            (session,),
        )
        return {root: None if node is None else node % (1 << 64) for root, node in found}


def may_send(state: Any, node: int, session: str) -> bool:
    """Return whether parts under the name of an upload are those of a node's own answer.

    An answer of which a server app has the list already, as after a restart in the middle of an
    upload, is known by the name of its upload alone, which only its sender was given.
    """
    senders = uploaded_under(state, session).values()
    return bool(senders) and all(sender in (node, None) for sender in senders)


def is_taken(state: Any, answer: Any) -> bool:
    """Return whether an answer that comes, by its metadata, has the id of another message.

    Ids that differ in the first character alone are the same here, since their lists are. An answer
    to a question that is gone has no id of another: Flower does not take it.
    """
    name, question = list_of(answer.message_id), answer.reply_to_message_id
    if _in_memory(state):
        with state.lock:
            asked = list(state.message_ins_store)
            answered = state.message_ins_id_to_message_res_id.get(question) == answer.message_id
        same = any(list_of(other) == name for other in asked)
        waits = question in asked
    else:
        with state.session() as session:
            run = session.connection().exec_driver_sql
            waits = _exists(run, "message_ins WHERE message_id = ?", question)
            same = _exists(run, "message_ins WHERE substr(message_id, 2) = ?", name[1:])
            which = "message_res WHERE message_id = ? AND reply_to_message_id = ?"
            answered = _exists(run, which, answer.message_id, question)
    return waits and not answered and (same or name in state.object_store)


def _exists(run: Any, which: str, *values: object) -> bool:
    """Return whether a table has a row: ``run`` takes a statement, ``which`` is what follows its
    FROM.
    """
    return run(f"SELECT 1 FROM {which}", values).first() is not None


def _in_memory(state: Any) -> bool:
    return hasattr(state, "message_ins_store")
