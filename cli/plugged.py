"""Commands of other packages: listed without an import, loaded when one is typed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click
import typer
import typer.core
import typer.main
from rich.markup import escape

from bract.installed.plugins import Plugin, elsewhere, not_there, plugins

GROUP = "bract.commands"
"""Entry points that name a Typer app, or a function with Typer's annotations."""

_COMPLETION = {"install_completion", "show_completion"}
"""Options that Typer gives every app, and bract has itself."""

_log = logging.getLogger(__name__)


class PluggedCommand(typer.core.TyperCommand):
    """A command of another package as `bract --help` lists it.

    Parameters
    ----------
    plugin
        Its entry point; None where the package is not installed.
    """

    def __init__(self, name: str, plugin: Plugin | None, *, help: str) -> None:
        super().__init__(name, help=help, short_help=help)
        self.plugin = plugin

    def load(self) -> click.Command:
        """Import the command.

        Raises
        ------
        PluginError
            If it cannot be imported, or is no command.
        BractError
            If its package is not installed, with the line that installs it.
        """
        if self.plugin is None:
            raise not_there(GROUP, str(self.name))
        entry = self.plugin.load()
        if isinstance(entry, typer.Typer):
            command = typer.main.get_command(entry)
        elif inspect.isfunction(entry):
            holder = typer.Typer()
            holder.command(self.name)(entry)
            command = typer.main.get_command(holder)
        else:
            raise self.plugin.refuse(f"{entry!r} is no Typer app and no function; name one that is")
        command.name = self.name
        command.params = [p for p in command.params if p.name not in _COMPLETION]
        command.invoke = partial(_ended, command.invoke)  # type: ignore[method-assign]
        return command


def _ended(invoke: Callable[[click.Context], Any], ctx: click.Context) -> Any:
    """Run a command; a status that it ends with is the process' own."""
    try:
        return invoke(ctx)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            raise typer.Exit(end.code or 0) from None
        typer.echo(end.code, err=True)
        raise typer.Exit(1) from None


def plugged_commands(own: Mapping[str, Any]) -> dict[str, PluggedCommand]:
    """Return the commands of installed packages, and those that packages of bract's would bring.

    Nothing is imported. The name of one of bract's own commands, or of another package's, is taken:
    one warning names the package that is left out.

    Parameters
    ----------
    own
        bract's own commands, by name.
    """
    found: dict[str, PluggedCommand] = {}
    for plugin in plugins(GROUP):
        if plugin.name in own or plugin.name in found:
            error = plugin.refuse(f"command {plugin.name!r} is taken; give it another name")
            _log.warning("%s", error)
            continue
        found[plugin.name] = PluggedCommand(plugin.name, plugin, help=escape(plugin.summary))
    for name, extra in elsewhere(GROUP).items():
        if name not in found:
            help = escape(f"Not installed: pip install 'bract[{extra}]'.")
            found[name] = PluggedCommand(name, None, help=help)
    return found
