"""Hear of replies that pass over a grid outside of a strategy, such as answers to an app's queries.

An app may hand the grid to its strategy late, and query clients before. Grids are objects of
Flower's classes; while an account is open, these classes' public methods tell it of the messages
that they return. They return what they would.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from bract.server.account import LeftAccount
from bract.strategies.polling import ForwardingGrid

_METHODS = ("send_and_receive", "push_messages", "pull_messages")

_accounts: weakref.WeakSet[LeftAccount] = weakref.WeakSet()
_wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
_inside = threading.local()


def overhear(account: LeftAccount) -> None:
    """Tell an account, as long as it lives, of the messages of every grid in this process."""
    _accounts.add(account)
    for kind in list(_kinds(Grid)):
        if kind in _wrapped or issubclass(kind, ForwardingGrid):
            continue
        _wrapped.add(kind)
        for name in _METHODS:
            method = kind.__dict__.get(name)
            if callable(method) and not getattr(method, "__isabstractmethod__", False):
                setattr(kind, name, _telling(name, method))


def stop_overhearing(account: LeftAccount) -> None:
    """Tell an account no more."""
    _accounts.discard(account)


@contextmanager
def heard() -> Iterator[None]:
    """Mark calls whose messages an account is told of by their caller."""
    before = getattr(_inside, "here", False)
    _inside.here = True
    try:
        yield
    finally:
        _inside.here = before


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    below: type[Any]
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


def _telling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _accounts or getattr(_inside, "here", False):
            return method(self, *args, **kwargs)
        messages: list[Any] = []
        if args:
            messages = list(args[0])
            args = (messages, *args[1:])
        elif given := next((key for key in ("messages", "message_ids") if key in kwargs), None):
            messages = kwargs[given] = list(kwargs[given])
        with heard():
            result = list(method(self, *args, **kwargs))
        for account in list(_accounts):
            if name != "pull_messages":
                account.sent([m for m in messages if isinstance(m, Message)])
            if name != "push_messages":
                account.came([m for m in result if isinstance(m, Message)], mine=False)
        return result

    return call
