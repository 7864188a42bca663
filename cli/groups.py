"""The order and the groups in which ``bract --help`` lists the commands."""

from __future__ import annotations

from typing import Any

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


class Grouped(typer.core.TyperGroup):
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
