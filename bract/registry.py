"""A small typed registry: models, defenses, attacks and data sets register under a name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from bract.errors import BractError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to entries of one kind.

    Parameters
    ----------
    kind
        What an entry is, in the singular ("model"); error messages use it.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, *, force: bool = False) -> Callable[[T], T]:
        """Decorate an entry to register it under ``name``.

        Raises
        ------
        ValueError
            If the name is taken and ``force`` is false.
        """

        def add(entry: T) -> T:
            if name in self._entries and not force:
                raise ValueError(f"{self.kind} {name!r} is registered already; pass force=True")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise BractError(unknown(self.kind, name, self._entries)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that ``name`` is no known ``kind``, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}"
