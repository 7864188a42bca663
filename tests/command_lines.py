"""Command lines of bract, parsed and not run."""

from __future__ import annotations

import shlex
from typing import Any

import click
import typer

from bract.cli.main import app

GROUP: Any = typer.main.get_command(app)
GROUP.commands = GROUP.every_command()


def parse(line: str) -> click.Context:
    """Parse a command line as `bract` would, and run nothing."""
    program, *words = shlex.split(line)
    assert program == "bract"
    command, context = GROUP, None
    while hasattr(command, "commands"):
        name = words.pop(0)
        context = click.Context(command, info_name=name, parent=context)
        command = command.commands[name]
    made: click.Context = command.make_context(command.name, list(words), parent=context)
    return made
