"""Entries of registries that other packages bring, found by their entry points.

A package adds an attack, a defense, a strategy, a model, a data set, an input or a question
with one line of its
``pyproject.toml``::

    [project.entry-points."bract.attacks"]
    my-attack = "my_package:MyAttack"

Nothing is imported before a registry is asked for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bract.errors import BractError

GROUPS = (
    "bract.attacks",
    "bract.data",
    "bract.defenses",
    "bract.inputs",
    "bract.models",
    "bract.questions",
    "bract.strategies",
)
"""Groups of entry points, one a kind of extension."""


class PluginError(BractError):
    """A plugin cannot be used; the message names its package and the fix."""


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

    def load(self) -> Any:
        """Import what the entry point names.

        Raises
        ------
        PluginError
            If it cannot be imported, for whatever reason.
        """
        try:
            return self.entry_point.load()
        except Exception as error:
            what = " ".join(str(error).split())
            raise self.refuse(
                f"{self.entry_point.value} cannot be imported ({type(error).__name__}: {what}); "
                "install what it needs or mend it"
            ) from error

    def refuse(self, reason: str) -> PluginError:
        """Return the error with the reason why this entry is not used."""
        return PluginError(
            f"plugin {self.name!r} of package {self.package}, group {self.entry_point.group}: "
            f"{reason}, or uninstall the package"
        )


def plugins(group: str) -> Iterator[Plugin]:
    """Yield what installed packages register in a group, by package and name."""
    found = [
        Plugin(
            name=entry.name,
            package=f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module,
            entry_point=entry,
        )
        for entry in entry_points(group=group)
    ]
    return iter(sorted(found, key=lambda plugin: (plugin.package, plugin.name)))
