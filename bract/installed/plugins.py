"""Entries of registries that other packages bring, found by their entry points.

A package adds an attack, a defense, a strategy, a model, a data set, an input, an invariant, a
question, a prior or a command with one line of its ``pyproject.toml``::

    [project.entry-points."bract.attacks"]
    my-attack = "my_package:MyAttack"

Nothing is imported before a registry is asked for the first time.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from bract.errors import BractError, apart, contained, one_line

GROUPS = (
    "bract.attackers",
    "bract.attacks",
    "bract.commands",
    "bract.data",
    "bract.defenses",
    "bract.disclosures",
    "bract.inputs",
    "bract.invariants",
    "bract.models",
    "bract.priors",
    "bract.questions",
    "bract.strategies",
)
"""Groups of entry points, one a kind of extension."""

_DEFENSES = dict.fromkeys(("censor", "precode", "soteria", "truncated-svd"), "papers")

_ELSEWHERE: dict[str, dict[str, str]] = {
    "bract.attackers": _DEFENSES,
    "bract.attacks": {
        **dict.fromkeys(("april", "dlg", "gradinversion", "idlg", "lamp", "sim", "tag"), "papers"),
        **dict.fromkeys(("flow", "ggl", "gias", "learned-inverter"), "priors"),
    },
    "bract.commands": {"harden": "harden", "prior": "priors"},
    "bract.defenses": _DEFENSES,
    "bract.models": dict.fromkeys(("convnet64", "densenet121", "vggface"), "papers"),
    "bract.priors": {"generator": "priors"},
}
"""Entries that packages of bract's own repository bring: the extra that installs each, by group."""


class PluginError(BractError):
    """A plugin cannot be used; the message names its package and the fix."""

    code = "plugin-faulty"


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package.

    Attributes
    ----------
    name
        What configurations and the command line call the entry.
    package
        Name and version of the package, as pip lists it.
    """

    name: str
    package: str
    entry_point: EntryPoint

    @property
    def summary(self) -> str:
        """The package's own description, in one line."""
        dist = self.entry_point.dist
        return str(dist.metadata["Summary"]) if dist and "Summary" in dist.metadata else ""

    def load(self) -> Any:
        """Import what the entry point names.

        Raises
        ------
        PluginError
            If it cannot be imported, for whatever reason.
        """
        try:
            with apart():
                return self.entry_point.load()
        except Exception as error:
            what = one_line(error, 300)
            raise self.refuse(
                f"{self.entry_point.value} cannot be imported ({type(error).__name__}: {what}); "
                "install what it needs or correct it"
            ) from error

    def refuse(self, reason: str) -> PluginError:
        """Return the error with the reason why this entry is not used."""
        return PluginError(
            f"plugin {self.name!r} of package {self.package}, group {self.entry_point.group}: "
            f"{reason}, or uninstall the package"
        )


def elsewhere(group: str) -> Mapping[str, str]:
    """Return the entries of a group that packages of bract's own bring, installed or not.

    Returns
    -------
    mapping
        By name, the extra of bract that installs the package: ``harden`` installs ``bract-harden``.
    """
    return _ELSEWHERE.get(group, {})


def not_there(group: str, name: str) -> BractError:
    """Return the error for one of `elsewhere` that is asked for where it is not installed."""
    extra = elsewhere(group)[name]
    kind = group.removeprefix("bract.").removesuffix("s")
    return BractError(
        f"{kind} {name!r} is in the package bract-{extra}, which is not installed: "
        f"pip install 'bract[{extra}]', or in a checkout: pip install ./plugins/bract-{extra}",
        code="package-missing",
    )


def deciding_packages() -> list[str]:
    """Return the top packages of installed plug-ins whose code can decide a result."""
    groups = (group for group in GROUPS if group not in ("bract.commands", "bract.strategies"))
    modules = {plugin.entry_point.module for group in groups for plugin in plugins(group)}
    return sorted({module.partition(".")[0] for module in modules} - {"bract"})


def is_of_bract(entry: type) -> bool:
    """Return whether a class is bract's own, or of one of the packages of `elsewhere`."""
    extras = {extra for group in _ELSEWHERE.values() for extra in group.values()}
    return entry.__module__.partition(".")[0] in {"bract", *(f"bract_{one}" for one in extras)}


def package_of(entry: type | Callable[..., Any]) -> str | None:
    """Return name and version of the package that registers the module of a class or function.

    None for bract's own.
    """
    root = entry.__module__.partition(".")[0]
    if root == "bract":
        return None
    for group in GROUPS:
        for plugin in plugins(group):
            if plugin.entry_point.module.partition(".")[0] == root:
                return plugin.package
    return None


@contextlib.contextmanager
def blaming(*entries: type | Callable[..., Any]) -> Iterator[None]:
    """Turn what an entry of another package raises into one line that names the package.

    A `BractError` passes as it is: it is the entry's own word on one observation. So does every
    error where all entries are bract's own, since that is a mistake of bract.

    Raises
    ------
    PluginError
        With the package, the error and the line of code.
    """
    try:
        with contained() if any(map(package_of, entries)) else contextlib.nullcontext():
            yield
    except BractError:
        raise
    except Exception as error:
        owners = [(entry, package) for entry in entries if (package := package_of(entry))]
        if not owners:
            raise
        entry, package = owners[0]
        raise PluginError(
            f"{entry.__name__} of package {package} failed: {type(error).__name__}: "
            f"{one_line(error, 200)} ({_where(error, entry)}); correct it, or uninstall the package"
        ) from error


def _where(error: Exception, entry: type | Callable[..., Any]) -> str:
    """Return file and line of the last frame in the entry's own package, of any where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    root = entry.__module__.partition(".")[0]
    mine = [f for f in frames if root in f.filename.replace(".py", "").split("/")]
    last = (mine or frames)[-1]
    return f"{last.filename.rpartition('/')[2]}, line {last.lineno}"


_remembered: dict[str, list[Plugin]] = {}


def remember_plugins() -> None:
    """Look through the installed packages once, for this process and those forked from it.

    Nothing is imported.
    """
    _remembered.update({group: list(plugins(group)) for group in GROUPS})


def plugins(group: str) -> Iterator[Plugin]:
    """Yield what installed packages register in a group, by package and name."""
    if group in _remembered:
        return iter(_remembered[group])
    read = ((folder, _changed(folder)) for folder in sys.path)
    packages = tuple(one for one in read if _holds_packages(*one))
    return iter(_installed(group, packages))


@lru_cache(maxsize=4 * len(GROUPS))
def _installed(group: str, packages: tuple[tuple[str, int | None], ...]) -> tuple[Plugin, ...]:
    """Read the entry points of a group; once, while the folders with packages are the same."""
    del packages
    found = [
        Plugin(
            name=entry.name,
            package=f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module,
            entry_point=entry,
        )
        for entry in entry_points(group=group)
    ]
    return tuple(sorted(found, key=lambda plugin: (plugin.package, plugin.name)))


def _changed(folder: str) -> int | None:
    """Return when a folder of the path last gained or lost a file, in ns; None without it."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return None


@lru_cache(maxsize=256)
def _holds_packages(folder: str, changed: int | None) -> bool:
    """Return whether a part of the path may hold packages' metadata: a folder with some, or an
    archive.
    """
    if changed is None:
        return False
    try:
        suffixes = {path.suffix for path in Path(folder).iterdir()}
    except OSError:
        return True
    return not suffixes.isdisjoint((".dist-info", ".egg-info", ".egg"))
