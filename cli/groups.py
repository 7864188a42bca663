"""The order and the groups in which ``bract --help`` lists the commands."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import click
import typer.core

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
    "Captures and results": ("fetch", "pack", "pull", "export", "prior"),
}
"""Commands by the heading they are listed under, both in the order of their first use."""


class Helped(typer.core.TyperGroup):
    """Commands whose arguments keep their help, which Typer before 0.21 loses with Click 8.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for command in self.commands.values():
            lost = [p for p in command.params if isinstance(p, typer.core.TyperArgument)]
            if command.callback is None or all(param.help for param in lost):
                continue
            hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
            for param in lost:
                told = (getattr(part, "help", None) for part in get_args(hints.get(param.name)))
                param.help = param.help or next((text for text in told if text), None)


class Grouped(Helped):
    """List commands in the order of `GROUPS`; those in no group are internal and hidden."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order = {name: panel for panel, names in GROUPS.items() for name in names}
        for name, command in self.commands.items():
            command.rich_help_panel = order.get(name)  # type: ignore[attr-defined]
            command.hidden = name not in order
        last = [name for name in self.commands if name not in order]
        self.commands = {name: self.commands[name] for name in (*order, *last)}

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
