"""Run one of Flower's commands with bract's rules put in place first.

    python -P -m bract.deploy.flower flower-supernode ARGUMENTS...

`bract.deploy.sockets` closes what Flower listens on, `bract.deploy.pinned` holds a site to the app
that its operator installed, `bract.deploy.clock` has it count the seconds that pass, and
`bract.deploy.heartbeats` and `bract.deploy.pace` have it notice sooner what happens.
`bract.deploy.admission` has a SuperNode say why it is refused.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bract.deploy import (
    admission,
    audit_log,
    clock,
    expiry,
    heartbeats,
    pace,
    pinned,
    shim,
    simulation,
    sockets,
    timeline,
)
from bract.deploy.rules import check_version, replace
from bract.errors import BractError
from bract.flower import COMMANDS, STARTERS
from bract.permissions import UMASK
from bract.timeline import note, span

NODE_CONFIG = "BRACT_NODE_CONFIG"
"""Environment variable with a SuperNode's node configuration. Arguments are shown to every user of
a machine, and a node configuration may hold a seed."""

_OPEN_PATHS = {
    # What a SuperNode needs of the SuperLink; submitting runs and starting apps stay on the socket.
    "flower-superlink": ("/health", "/v1/fleet/"),
    "flower-supernode": ("/health",),
}

_OPENS_PORT = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


def command_line(name: str, *, forked: bool) -> list[str]:
    """Return how to start one of Flower's commands under the rules, afresh or by a fork server."""
    if forked:
        return [sys.executable, "-ISE", str(shim.__file__), name]
    return [sys.executable, "-P", "-m", "bract.deploy.flower", name]


def load(name: str) -> Callable[[], Any]:
    """Import the entry point of a command."""
    module, _, attribute = COMMANDS[name].partition(":")
    entry: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    return entry


def run(name: str) -> None:
    """Run the command ``name`` with the arguments in ``sys.argv[1:]``."""
    check_version()
    os.umask(UMASK)  # its database, and what it puts into its home
    entry = load(name)
    clock.keep_even()
    pace.ask_again_soon()
    if sockets.FOLDER in os.environ:
        sockets.route_requests()
        if name in _OPEN_PATHS:
            sockets.serve_on_socket(_OPEN_PATHS[name], audit_log.audit)
            for variable in _OPENS_PORT:
                os.environ.pop(variable, None)
    if name == "flower-supernode":
        pinned.guard_supernode()
        heartbeats.expire_sooner()
        pace.follow_work()
        admission.say_why_refused()
    elif name == "flwr-clientapp":
        pinned.guard_clientapp()
        heartbeats.beat_faster()
    elif name == "flwr-simulation":
        simulation.simulate_sites()
    if name in ("flower-superlink", "flower-supernode"):
        expiry.watch_as_told()
    if name in STARTERS:
        _restrict_children(name)
    if name == "flower-supernode" and NODE_CONFIG in os.environ:
        sys.argv += ["--node-config", os.environ[NODE_CONFIG]]
    timeline.note_spans(name)
    with span(f"run {name}"):
        if name != "flower-supernode":
            entry()
            return
        try:
            entry()
        except SystemExit as ended:
            sys.exit(admission.exit_code(ended.code))
        admission.end_supernode()


def _restrict_children(name: str) -> None:
    """Let a process of Flower start only what belongs to it, and that under the rules."""
    allowed = _children(name)

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        child, *arguments = command
        if child not in allowed:
            raise BractError(f"{name} asked to start {child}; it may start {', '.join(allowed)}")
        if child == "flwr-simulation":
            # Flower would drop its output, and with it that of its clients.
            options = options | {"stdout": None, "stderr": None}
        line = command_line(child, forked=shim.SOCKET in os.environ)
        began = time.monotonic_ns()
        started = subprocess.Popen([*line, *arguments], **options)
        note(f"start {child}", began)
        return started

    replace(STARTERS[name], "subprocess", SimpleNamespace(**(vars(subprocess) | {"Popen": start})))


def _children(name: str) -> tuple[str, ...]:
    if name != "flower-superexec":
        return ("flower-superexec",)
    if simulation.SITES in os.environ:
        return ("flwr-simulation",)
    return ("flwr-clientapp",) if pinned.APP in os.environ else ("flwr-serverapp",)


def main() -> None:
    """Run the command that the first argument names."""
    name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    try:
        run(name)
    except BractError as error:
        sys.exit(f"{name}: {error}")


if __name__ == "__main__":
    main()
