"""The order and the groups in which ``bract --help`` lists the commands."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, get_args, get_type_hints

import click
import typer.core

from bract.cli.plugged import PluggedCommand, plugged_commands

GROUPS = {
    "A first day": ("demo", "init", "run", "audit", "report", "doctor"),
    "Your own app": ("describe", "schema", "watch", "compare", "harden"),
    "Operating a federation": (
        "provision",
        "site",
        "policy",
        "keygen",
        "superlink",
        "supernode",
        "follow",
        "stop",
    ),
    "Captures and results": ("release", "fetch", "pack", "pull", "export", "prior"),
}
"""Commands by the heading they are listed under, both in the order of their first use."""

PLUGGED = "From other packages"
"""The heading of commands that other packages bring, of a name that no heading lists."""

_PANELS = {name: panel for panel, names in GROUPS.items() for name in names}


class Helped(typer.core.TyperGroup):
    """Commands whose arguments keep their help, which Typer before 0.21 loses with Click 8.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            _keep_help(command)


def _keep_help(command: click.Command) -> None:
    """Give arguments the help of their annotations where Typer lost it."""
    lost = [p for p in command.params if isinstance(p, typer.core.TyperArgument)]
    if command.callback is None or all(param.help for param in lost):
        return
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for param in lost:
        helps = (getattr(part, "help", None) for part in get_args(hints.get(param.name)))
        param.help = param.help or next((text for text in helps if text), None)


class Grouped(Helped):
    """List commands in the order of `GROUPS`; bract's own in no group are internal and hidden.

    Those of other packages follow, in a group of their own unless `GROUPS` has their name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, command in self.commands.items():
            command.rich_help_panel = _PANELS.get(name)  # type: ignore[attr-defined]
            command.hidden = name not in _PANELS

    @cached_property
    def _plugged(self) -> dict[str, PluggedCommand]:
        found = plugged_commands(self.commands)
        for name, command in found.items():
            command.rich_help_panel = _PANELS.get(name, PLUGGED)
        return found

    def every_command(self) -> dict[str, click.Command]:
        """Return all commands that are installed, those of other packages loaded."""
        plugged = {n: self._loaded(c) for n, c in self._plugged.items() if c.plugin is not None}
        return {**{n: c for n, c in self.commands.items() if n not in self._plugged}, **plugged}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `GROUPS`, then the others."""
        del ctx
        names = list({**self.commands, **self._plugged})
        ordered = [name for name in _PANELS if name in names]
        return ordered + [name for name in names if name not in _PANELS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command as the help lists it: one of another package is not loaded."""
        del ctx
        return self.commands.get(cmd_name) or self._plugged.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that was typed, loaded."""
        if args and args[0] not in self.commands:
            self.commands.update(self._plugged)  # Click suggests names of these
        name, command, left = super().resolve_command(ctx, args)
        if isinstance(command, PluggedCommand) and not (
            ctx.resilient_parsing and command.plugin is None
        ):
            command = self._loaded(command)
        return name, command, left

    def _loaded(self, command: PluggedCommand) -> click.Command:
        loaded = command.load()
        _keep_help(loaded)
        return loaded

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a wrong use of it is printed as JSON too where that was asked for."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from bract.cli.console import print_error

            print_error("usage", error.format_message())
            raise


def command_group(**options: Any) -> typer.Typer:
    """Make a group of commands, for every Typer and Click that a Flower of bract's requires.

    Click suggests names of commands from 8.4 on by itself, and Typer would repeat it; a Typer
    before 0.20 has no such option.
    """
    if "suggest_commands" in inspect.signature(typer.Typer).parameters:
        options["suggest_commands"] = not _CLICK_SUGGESTS
    return typer.Typer(**{"cls": Helped, **options})


_CLICK_SUGGESTS = hasattr(click.exceptions, "NoSuchCommand")
