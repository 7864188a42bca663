"""Run command lines from stdin, each in a forked process; see `image_parts.Part.run`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

APPS = {
    "flower-supernode": "bract.client.app",
    "flower-superlink": "bract.server.app",
    "flower-superexec": "bract.server.app",
}
PRELOADED = ("torchvision", "bract.cli.main", "bract.runtime.flower", "bract.cli.run")
"""What most commands import. A module that is missing fails in each command's own process."""


def become(path: str, words: list[str]) -> NoReturn:
    """Import what a command of Flower's imports, instead of becoming it."""
    import bract.runtime.flower  # noqa: F401
    from bract.installed import flower

    name = next(word for word in words if word.startswith("flower-"))
    flower.entry_point(name)
    importlib.import_module(APPS[name])
    sys.stderr.write(f"starts {name}\n")
    raise SystemExit(0)


def run(command: list[str]) -> None:
    """Run one command line in this process."""
    if command[0] in ("python", "python3"):
        sys.argv = command[1:]
        exec(command[2], {"__name__": "__main__"})
        return
    from bract.cli.main import main

    sys.argv = command
    main()


def forked(work: Callable[[], Any]) -> tuple[int, str]:
    """Return a child's exit code and output."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            code = 1
            try:
                work()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:  # noqa: BLE001 - the child must end here
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def main() -> None:
    """Answer the request on stdin on stdout."""
    asked = json.load(sys.stdin)
    for module in (*PRELOADED, *APPS.values()):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    from bract.installed import flower

    for name in APPS:
        with contextlib.suppress(ModuleNotFoundError):
            flower.entry_point(name)
    os.execv = become  # type: ignore[assignment]
    found = []
    for command in asked["commands"]:
        code, output = forked(functools.partial(run, command))
        found.append({"command": command, "code": code, "output": output})
    for module in asked["modules"]:
        code, output = forked(functools.partial(importlib.import_module, module))
        found.append({"command": [module], "code": code, "output": output})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
