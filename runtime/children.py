"""A process of Flower starts only what belongs to it, and that under the rules.

What it starts is passed its token by the environment: arguments are shown to every user of the
machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

from bract.errors import BractError
from bract.process.timeline import note
from bract.runtime import pinned, shim, simulation
from bract.runtime.rule import Rule

TOKEN = "BRACT_APP_TOKEN"
"""Environment variable with the token by which a SuperLink or a SuperNode knows an app's process.
Flower gives it as an argument."""

_STARTERS = ("flower-superlink", "flower-supernode", "flower-superexec")
"""Commands that start others; no code of an app runs in their processes."""


def command_line(name: str, *, forked: bool) -> list[str]:
    """Return how to start one of Flower's commands under the rules, afresh or by a fork server."""
    if forked:
        return [sys.executable, "-ISE", str(shim.__file__), name]
    return [sys.executable, "-P", "-m", "bract.runtime.flower", name]


def without_secrets(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a command without its token, and the environment to pass it by."""
    left, secrets = list(arguments), {}
    for place, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if option == "--token":
            width = 1 if value else 2
            secrets[TOKEN] = value or "".join(arguments[place + 1 : place + 2])
            del left[place : place + width]
            break
    return left, secrets


def restricted(name: str, popen: Any = subprocess.Popen) -> Any:
    """Return a class of processes, of which the command ``name`` starts its own alone."""
    allowed = _children(name)

    class Restricted(popen):  # type: ignore[misc]
        def __init__(self, command: Sequence[str], **options: Any) -> None:
            child, *arguments = command
            began = time.monotonic_ns()
            if child not in allowed:
                raise BractError(
                    f"{name} asked to start {child}; it may start {', '.join(allowed)}",
                    code="request-refused",
                )
            if child == "flwr-simulation":
                # Flower would drop its output, and with it that of its clients.
                options |= {"stdout": None, "stderr": None}
            if not options and child in shim.APPS and _forked(child, arguments, began):
                return
            line = command_line(child, forked=shim.SOCKET in os.environ)
            arguments, secrets = without_secrets(arguments)
            if secrets:
                options["env"] = {**(options.get("env") or os.environ), **secrets}
            super().__init__([*line, *arguments], **options)
            note(f"start {child}", began)

    return Restricted


def _forked(child: str, arguments: list[str], began: int) -> bool:
    """Have the fork server start an app for this process, which a shim would do a process later."""
    connection = shim.ask(child, arguments)
    if connection is None:
        return False
    Thread(target=shim.follow, args=(child, connection), daemon=True).start()
    note(f"start {child}", began)
    return True


def _children(name: str) -> tuple[str, ...]:
    if name != "flower-superexec":
        return ("flower-superexec",)
    if simulation.SITES in os.environ:
        return ("flwr-simulation",)
    return ("flwr-clientapp",) if pinned.APP in os.environ else ("flwr-serverapp",)


_STARTS = "subprocess:Popen"

RULE = Rule(
    name="own children",
    kind="security",
    commands=_STARTERS,
    needs=(_STARTS,),
    does="A process of Flower starts only what belongs to it, and that under these rules.",
    without="Flower would start processes that no rule holds for",
    put=lambda name: {_STARTS: lambda popen: restricted(name, popen)},
)
