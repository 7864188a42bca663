"""A small typed registry: models, defenses, attacks and data sets register under a name."""

from __future__ import annotations

import difflib
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from bract.errors import BractError, shown
from bract.installed.plugins import Plugin, PluginError, elsewhere, not_there, plugins

_log = logging.getLogger(__name__)

T = TypeVar("T")

Check = Callable[[str, object], str | None]
"""Given a name and what a plugin registers under it: what is wrong with it, or None."""


class Registry(Generic[T]):
    """Names to entries of one kind.

    bract's own entries register where they are defined. Those of other packages are loaded when
    the registry is first asked for anything. One that cannot be loaded, is of another kind or
    has a taken name is left out with one warning, which is an error to who asks for its name.

    Parameters
    ----------
    kind
        What an entry is, in the singular ("model"); error messages use it.
    group
        Group of entry points under which other packages register; None takes none.
    check
        What a plugin's entry has to be.
    beside
        Registry whose plugins register here too, by decorator, when they are imported.
    modules
        Modules in which bract's own entries register, which are imported when it is first asked.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str | None = None,
        check: Check | None = None,
        beside: Registry[Any] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self.group = group
        self._check = check
        self._beside = beside
        self._modules = modules
        self._entries: dict[str, T] = {}
        self._refused: dict[str, PluginError] = {}
        self._packages: dict[str, str] = {}
        self._loaded = False

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

    def get(self, name: str) -> T | None:
        """Return what is registered under ``name``, or None."""
        self._load_plugins()
        return self._entries.get(name)

    def plugins(self) -> dict[str, str]:
        """Return the names that other packages registered, and each one's package."""
        self._load_plugins()
        return dict(self._packages)

    def refused(self) -> dict[str, PluginError]:
        """Return why plugins were left out, by name."""
        self._load_plugins()
        return dict(self._refused)

    def missing(self, name: str) -> BractError:
        """Return why there is no entry of a name: left out, not installed, or unknown."""
        self._load_plugins()
        if name in self._refused:
            return self._refused[name]
        if self.group is not None and name in elsewhere(self.group):
            return not_there(self.group, name)
        return BractError(unknown(self.kind, name, self._entries), code="unknown-name")

    def __getitem__(self, name: str) -> T:
        self._load_plugins()
        if name in self._entries:
            return self._entries[name]
        raise self.missing(name)

    def __contains__(self, name: object) -> bool:
        self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(sorted(self._entries))

    def _load_plugins(self) -> None:
        if self._beside is not None:
            self._beside._load_plugins()
        if self._loaded:
            return
        self._loaded = True  # first: what is imported now may ask this registry
        for module in self._modules:
            import_module(module)
        for plugin in plugins(self.group) if self.group is not None else ():
            try:
                self._add(plugin)
            except PluginError as error:
                self._refused.setdefault(plugin.name, error)
                _log.warning("%s", error)

    def _add(self, plugin: Plugin) -> None:
        known = self._entries.get(plugin.name)
        # A module that other entry points named first may have registered this one by decorator.
        if known is not None and getattr(known, "__module__", None) != plugin.entry_point.module:
            owner = self._packages.get(plugin.name, "bract itself")
            raise plugin.refuse(
                f"{self.kind} {plugin.name!r} is taken by {owner}; give it another name"
            )
        entry = plugin.load()
        problem = None if self._check is None else self._check(plugin.name, entry)
        if problem is None and self._entries.get(plugin.name, entry) is not entry:
            problem = f"its module registers another {self.kind} under this name; keep one"
        if problem is not None:
            raise plugin.refuse(problem)
        self._entries[plugin.name] = entry
        self._packages[plugin.name] = plugin.package


class Named(Protocol):
    """A class with the name that it is registered under."""

    name: ClassVar[str]


N = TypeVar("N", bound=Named)


class Outlines(Generic[N]):
    """What records and pages need of a registry's entries, without what implements these.

    bract's own entries have an outline, a class that the entry extends. An entry of another package
    is its own outline: the registry is imported, and asked, where one of its name is there.

    Parameters
    ----------
    own
        Outlines of bract's own entries.
    group
        Group of entry points of the registry.
    place
        The registry, as ``module:name``.
    """

    def __init__(self, *own: type[N], group: str, place: str) -> None:
        self._own = {outline.name: outline for outline in own}
        self._group = group
        self._module, _, self._name = place.partition(":")

    def get(self, name: str) -> type[N] | None:
        """Return the outline of an entry; None where there is none, or its plugin is faulty."""
        if name in self._own or name not in self:
            return self._own.get(name)
        return self._registry().get(name)

    def __getitem__(self, name: str) -> type[N]:
        return self._own[name] if name in self._own else self._registry()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._others()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._own.keys() | self._others()))

    def _others(self) -> set[str]:
        """Return the names of other packages' entries, of which none is imported."""
        found = {plugin.name for plugin in plugins(self._group)}
        if self._module in sys.modules:  # then entries may have registered without an entry point
            found.update(self._registry())
        return found

    def _registry(self) -> Registry[type[N]]:
        registry: Registry[type[N]] = getattr(import_module(self._module), self._name)
        return registry


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return that ``name`` is no known ``kind``, with the nearest known one."""
    names = sorted(known)
    # ``steps`` is nearer to ``local_steps``, which has it as a word, than to ``eps``.
    word = name.rpartition(".")[2]
    with_it = [one for one in names if word in one.rpartition(".")[2].split("_")]
    near = difflib.get_close_matches(name[:100], with_it or names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {shown(name)}.{hint} Known: {', '.join(names)}"


def named(base: type, name: str, entry: object) -> str | None:
    """Return what is wrong with a plugin's class that has to extend ``base`` under its own name."""
    if not (isinstance(entry, type) and issubclass(entry, base)):
        return (
            f"{entry!r} is no subclass of {base.__module__}.{base.__qualname__}; name one that is"
        )
    own = getattr(entry, "name", None)
    if own != name:
        return f"{entry.__name__}.name is {own!r}, expected {name!r}; use one name"
    return None


def import_modules(package: ModuleType) -> None:
    """Import every module of a package, so that what registers in them is registered."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)
