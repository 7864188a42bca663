"""Run one of Flower's commands with bract's rules put in place first.

    python -P -m bract.deploy.flower flower-supernode ARGUMENTS...

`bract.deploy.sockets` closes what Flower listens on, `bract.deploy.pinned` holds a site to the app
that its operator installed, `bract.deploy.clock` has it count the seconds that pass, and
`bract.deploy.pace` has it notice sooner what happens. `bract.deploy.admission` has a SuperNode say
why it is refused, `bract.deploy.transfers` decides how many connections it uses, and
`bract.deploy.resuming` has it go on with an upload. By `bract.deploy.arriving` a SuperLink hands on
answers that are whole, by `bract.deploy.trees` it keeps a bounded list of parts for each message,
and by `bract.deploy.senders` it lets a node touch its own messages alone; by
`bract.deploy.parts_on_disk` it keeps large parts in files. By `bract.deploy.untrusted` a server app
outlives an answer that it cannot decode; by `bract.deploy.retrying` it and a SuperNode ask again
where the SuperLink failed.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any, NoReturn

from bract.deploy import (
    admission,
    arriving,
    audit_log,
    clock,
    contact,
    expiry,
    holding,
    joining,
    pace,
    parts,
    parts_on_disk,
    pinned,
    resuming,
    retrying,
    senders,
    shim,
    simulation,
    sockets,
    timeline,
    transfers,
    trees,
    untrusted,
)
from bract.deploy.rules import check_version
from bract.errors import BractError
from bract.flower import entry_point
from bract.freed_memory import return_freed_memory
from bract.permissions import UMASK
from bract.timeline import note, span

NODE_CONFIG = "BRACT_NODE_CONFIG"
"""Environment variable with a SuperNode's node configuration. Arguments are shown to every user of
a machine, and a node configuration may hold a seed."""

TOKEN = "BRACT_APP_TOKEN"
"""Environment variable with the token by which a SuperLink or a SuperNode knows an app's process.
Flower gives it as an argument."""

_OPEN_PATHS = {
    # What a SuperNode needs of the SuperLink; submitting runs and starting apps stay on the socket.
    "flower-superlink": ("/health", "/v1/fleet/"),
    "flower-supernode": ("/health",),
}

_STARTERS = ("flower-superlink", "flower-supernode", "flower-superexec")
"""Commands that start others; no code of an app runs in their processes."""

_OPENS_PORT = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


def command_line(name: str, *, forked: bool) -> list[str]:
    """Return how to start one of Flower's commands under the rules, afresh or by a fork server."""
    if forked:
        return [sys.executable, "-ISE", str(shim.__file__), name]
    return [sys.executable, "-P", "-m", "bract.deploy.flower", name]


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


def run(name: str) -> None:
    """Run the command ``name`` with the arguments in ``sys.argv[1:]``."""
    check_version()
    if (token := os.environ.pop(TOKEN, None)) is not None:
        sys.argv += ["--token", token]  # which changes nothing of what others are shown
    os.umask(UMASK)  # its database, and what it puts into its home
    entry = entry_point(name)
    clock.keep_even()
    pace.ask_again_soon()
    parts.ask_together()
    if sockets.FOLDER in os.environ:
        sockets.route_requests()
        if name in _OPEN_PATHS:
            sockets.serve_on_socket(_OPEN_PATHS[name], audit_log.audit)
            for variable in _OPENS_PORT:
                os.environ.pop(variable, None)
    if name == "flower-supernode":
        pinned.guard_supernode()
        pace.follow_work()
        resuming.go_on_with_uploads()
        connections = transfers.Connections()
        connections.use()
        sockets.intercept_requests(
            retrying.Retries(), admission.Admission(), contact.Contact(), connections
        )
    elif name == "flower-superlink":
        arriving.hand_on_whole_answers()
        trees.bound_object_trees()
        senders.check_senders()
        sockets.allow_many_connections()
    elif name == "flwr-serverapp":
        untrusted.read_answers_as_untrusted()
        sockets.intercept_requests(retrying.Retries())
    elif name == "flwr-clientapp":
        pinned.guard_clientapp()
    elif name == "flwr-simulation":
        simulation.restart_processes()
    if name in parts.HANDLERS:
        return_freed_memory()  # parts of large messages, up to 5 MiB each
        parts.serve_together(name)
        parts_on_disk.keep_parts_on_disk()
        holding.hold_questions(name)
        expiry.watch_as_told()
    if name in _STARTERS:
        _restrict_children(name)
    if name == "flower-supernode" and NODE_CONFIG in os.environ:
        sys.argv += ["--node-config", os.environ[NODE_CONFIG]]
    if name in shim.APPS:
        joining.join_once()
    timeline.note_spans(name)
    with span(f"run {name}"):
        if name != "flower-supernode":
            entry()
            return
        try:
            entry()
        except SystemExit as ended:
            sys.exit(admission.exit_code(ended.code))
        # Flower's goes on without its connection, and looks healthy.
        sys.exit(admission.exit_code(1))


def _restrict_children(name: str) -> None:
    """Let a process of Flower start only what belongs to it, and that under the rules."""
    allowed = _children(name)

    class Restricted(subprocess.Popen[bytes]):
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

    setattr(subprocess, "Popen", Restricted)  # noqa: B010


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


def exit_code(ended: SystemExit) -> int:
    """Return the code of an exit, whose text goes to stderr as Python's own does."""
    if isinstance(ended.code, str):
        sys.stderr.write(f"{ended.code}\n")
    return ended.code if isinstance(ended.code, int) else int(bool(ended.code))


def _leave(code: int) -> NoReturn:
    """End this process now; a SuperNode's thread that serves its apps would outlive its loop."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the command that the first argument names."""
    name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    try:
        run(name)
    except BractError as error:
        sys.exit(f"{name}: {error}")
    except SystemExit as ended:
        if name == "flower-supernode":
            _leave(exit_code(ended))
        raise


if __name__ == "__main__":
    main()
