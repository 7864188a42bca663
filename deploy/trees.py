"""A SuperLink hands on no tree of objects that is more than its sender wrote down.

A site names the objects of its answer as a tree, and Flower builds it anew from what each object
was first said to hold. An object may be named again without what it holds, so that a short list
grows by two at each of its levels, and by one level with each list: the SuperLink then builds it
with its store locked, for as long as the sender likes, or hands on what no process can parse.
Beyond these bounds the answer is dropped, as Flower drops one whose objects are missing.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from bract.errors import BractError
from bract.flower import STORES, NoObjectInStoreError, installed

MOST = 100_000
"""Objects of one message. One of 1 GB has about 200 parts besides one object for each tensor."""

DEEPEST = 20
"""Objects within each other: of a message, a record, an array and its parts there are five."""


def bound_object_trees() -> None:
    """Have the stores of this SuperLink build no tree beyond `MOST` and `DEEPEST`."""
    for store in stores():
        bound(store)


def stores() -> list[Any]:
    """Return Flower's classes of stores for the parts of messages, that in memory first."""
    found = []
    for module, name in STORES:
        store = getattr(importlib.import_module(module), name, None)
        for method in ("get", "get_object_tree", "put"):
            if not callable(getattr(store, method, None)):
                raise BractError(
                    f"{module}.{name} of Flower {installed()} has no {method}: a rule of bract "
                    "would not hold, so the process does not start",
                    code="flower-version",
                )
        found.append(store)
    return found


def bound(store: Any) -> None:
    """Bound the trees that a class of stores builds."""
    build: Callable[[Any, str], Any] = store.get_object_tree
    here = threading.local()

    def get_object_tree(self: Any, object_id: str) -> Any:
        if getattr(here, "depth", 0) == 0:
            here.depth, here.count = 0, 0
        if here.depth == DEEPEST or here.count == MOST:
            raise NoObjectInStoreError(
                f"what belongs to it is more than {MOST} objects, or more than {DEEPEST} within "
                "each other; nothing of it is handed on"
            )
        here.depth, here.count = here.depth + 1, here.count + 1
        try:
            return build(self, object_id)
        except NoObjectInStoreError as error:
            # Flower's own text at each level says that a child is missing.
            raise NoObjectInStoreError(_first(error).message) from None
        finally:
            here.depth -= 1

    store.get_object_tree = get_object_tree


def _first(error: Any) -> Any:
    return error.__cause__ or error
