"""Run one of Flower's commands with bract's rules put in place first.

    python -P -m bract.runtime.flower flower-supernode ARGUMENTS...

The rules are those of `bract.runtime.rules`.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from bract.disk.permissions import UMASK
from bract.errors import BractError
from bract.installed.flower import entry_point
from bract.process.freed_memory import return_freed_memory
from bract.process.timeline import span
from bract.runtime import admission, sockets
from bract.runtime.children import TOKEN
from bract.runtime.daily_check import start_daily_check
from bract.runtime.rule import hold, report
from bract.runtime.rules import RULES

NODE_CONFIG = "BRACT_NODE_CONFIG"
"""Environment variable with a SuperNode's node configuration. Arguments are shown to every user of
a machine, and a node configuration may hold a seed."""

_REPORTING = ("flower-superlink", "flower-supernode", "flwr-serverapp", "flwr-simulation")
"""Commands that report which rules stay off; the others start anew for each message."""

_OPENS_PORT = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


def run(name: str) -> None:
    """Run the command ``name`` with the arguments in ``sys.argv[1:]``."""
    if (token := os.environ.pop(TOKEN, None)) is not None:
        sys.argv += ["--token", token]  # which changes nothing of what others are shown
    os.umask(UMASK)  # its database, and what it puts into its home
    entry = entry_point(name)
    off = hold(name, RULES)
    if name in _REPORTING:
        for line in report(off):
            sys.stderr.write(f"{name}: {line}\n")
    if name in sockets.OPEN_PATHS:
        if sockets.FOLDER in os.environ:
            for variable in _OPENS_PORT:
                os.environ.pop(variable, None)
        return_freed_memory()  # parts of large messages, up to 5 MiB each
        start_daily_check()
    if name == "flower-superlink":
        sockets.allow_many_connections()
    if name == "flower-supernode" and NODE_CONFIG in os.environ:
        sys.argv += ["--node-config", os.environ[NODE_CONFIG]]
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
