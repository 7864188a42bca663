"""The ``bract`` command.

Exit codes: 0 done, 1 failed, 2 bad input, 3 leakage above ``--fail-on`` or nothing for it
to judge, 128 and the signal's number where one ended it (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP).
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import bract
from bract.cli.commands.audits import audit, compare, describe, schema
from bract.cli.commands.deployment import superexec, superlink, supernode
from bract.cli.commands.policy import policy
from bract.cli.commands.provision import keygen, provision, site
from bract.cli.commands.remote import fetch, follow, pack, pull, stop
from bract.cli.commands.reports import export, release, report, watch
from bract.cli.commands.runs import demo, doctor, init, run
from bract.cli.examples import epilog
from bract.cli.groups import Grouped, command_group
from bract.cli.signals import Stopped, forget, listen
from bract.disk.permissions import UMASK
from bract.errors import (
    BractError,
    LeakageError,
    NothingAttackedError,
    PrivacyAlarmError,
    RunFailedError,
    missing_room,
    not_installed,
    one_line,
    out_of_memory,
)
from bract.installed import naming_their_line

app = command_group(
    name="bract",
    cls=Grouped,
    help="Deploy a Flower federation that defends its gradients, and audit what its server sees.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

COMMANDS = (
    *(init, demo, run, doctor),
    *(describe, schema, audit, compare),
    *(report, release, watch, export),
    *(follow, stop, fetch, pack, pull),
    *(superlink, superexec, supernode),
    *(keygen, provision),
)
"""Functions of the commands, each of the command's name; `GROUPS` orders them in the help."""

for _command in COMMANDS:
    app.command(_command.__name__, epilog=epilog(_command.__name__))(_command)
for _name, _group in {"site": site, "policy": policy}.items():
    app.add_typer(_group, name=_name)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"bract {bract.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    from bract.cli.console import set_up_logging

    del version
    set_up_logging(verbose)


def main(command: typer.Typer | None = None, name: str = "bract") -> None:
    """Run a command line, bract's own by default; never show a traceback for bad input."""
    from bract.cli.console import begin_output, json_alone

    begin_output()
    listen()
    os.umask(UMASK)  # TensorBoard, MLflow and Flower make files of their own
    with json_alone():
        _run(command or app, name)


def _run(command: typer.Typer, name: str) -> None:
    try:
        with naming_their_line("click", "typer", "rich"):  # rich ends at a closed pipe
            command(prog_name=name)
    except RunFailedError as error:
        _end(1, error.code, str(error))
    except BractError as error:
        _end(2, error.code, str(error))
    except LeakageError as error:
        _end(3, error.code, str(error), lead="")
    except NothingAttackedError as error:
        _end(4, error.code, str(error))
    except PrivacyAlarmError as error:
        _end(5, error.code, str(error), lead="alarm: ")
    except OSError as error:
        _end(*_operating_system(error))
    except ModuleNotFoundError as error:
        if (missing := not_installed(error)) is not None:
            _end(2, missing.code, str(missing))
        if (room := missing_room(error)) is None:
            raise
        _end(
            2,
            "role-missing",
            f"this installation has no {room}: images of a client or a server leave out what they "
            "need not hold; run this command in the audit image, or install bract",
        )
    except (MemoryError, RuntimeError, ImportError) as error:
        if not out_of_memory(error):
            raise
        why = one_line(error, 200) or type(error).__name__
        _end(
            1,
            "out-of-memory",
            f"out of memory ({why}); free some and try again: what was finished is kept",
        )
    except Stopped as stopped:
        forget()
        _end(stopped.code, "interrupted", str(stopped), lead="")


def _end(status: int, code: str, message: str, *, lead: str = "error: ") -> NoReturn:
    """Print why the command ends, as JSON too where it was asked for, and exit."""
    from bract.cli.console import print_error, say

    say(" ".join(f"{lead}{message}".splitlines()))
    print_error(code, message)
    sys.exit(status)


_NAMED_WRONGLY = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTEMPTY),
}
"""Errors of the operating system about the file that a person named: bad input."""


def _operating_system(error: OSError) -> tuple[int, str, str]:
    """Return status and code of an error of the operating system, and what happened to what."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and error.filename:
        from bract.disk.files import write_failed

        failed = write_failed(Path(error.filename), error)
        return 1, failed.code, str(failed)
    status = 2 if error.filename and error.errno in _NAMED_WRONGLY else 1
    named = "operating system" if error.filename is None else one_line(str(error.filename), 300)
    return status, "system-error", f"{named}: {one_line(error)}"


if __name__ == "__main__":
    main()
