"""``bract follow``, ``stop``, ``fetch``, ``pack`` and ``pull``: runs on another machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bract.cli.console import print_json, say
from bract.cli.options import (
    Format,
    FormatOption,
    InsecureOption,
    RootCertificatesOption,
    RunArgument,
)
from bract.errors import BractError, one_line

SuperLinkOption = Annotated[
    str,
    typer.Option(
        "--superlink",
        help="host:port, a socket, or the name of a connection in Flower's config.toml.",
    ),
]
RunIdArgument = Annotated[
    int, typer.Argument(metavar="RUN_ID", help="Flower's number of the run.", min=1)
]


def follow(
    run_id: RunIdArgument,
    superlink: SuperLinkOption,
    root_certificates: RootCertificatesOption = None,
    insecure: InsecureOption = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Show a run at another machine's SuperLink from its first round to its end."""
    from bract.cli.remote.connection import connect
    from bract.cli.remote.running import follow_on, tell_next
    from bract.cli.remote.where import Where

    where = Where(superlink, root_certificates, insecure)
    with connect(where) as control:
        control.standing(run_id)
        followed = follow_on(control, run_id, where)
    tell_next(followed)
    if output.is_json:
        print_json(followed.to_dict())


def stop(
    run_id: RunIdArgument,
    superlink: SuperLinkOption,
    root_certificates: RootCertificatesOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Stop a run at another machine's SuperLink; its files there stay."""
    from bract.cli.remote.connection import connect
    from bract.cli.remote.where import Where

    with connect(Where(superlink, root_certificates, insecure)) as control:
        standing = control.standing(run_id)
        if standing.ended:
            raise BractError(
                f"run {run_id} has ended already ({standing.ending})", code="run-ended"
            )
        if not control.stop(run_id):
            raise BractError(f"run {run_id} ended before it could be stopped", code="run-ended")
    say(f"run {run_id} is stopped; captures and models so far stay at the server")


def pack(
    run: RunArgument,
    out: Annotated[
        str, typer.Option("--out", help="File to write; - writes to stdout, for `bract pull -`.")
    ],
) -> None:
    """Write what of RUN may leave its machine to one file: redacted report, metrics, last model."""
    from bract.cli.packing import pack as write

    write(run, out)


def pull(
    source: Annotated[
        str, typer.Argument(metavar="PACK", help="File that `bract pack` wrote; - reads stdin.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make; it must not be there yet.")],
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Check a pack from another machine, and keep all of it or nothing."""
    from bract.cli.packing import REPORT
    from bract.cli.unpacking import PAGE
    from bract.cli.unpacking import pull as read

    contents = read(source, out)
    if output.is_json:
        print_json(contents.to_dict() | {"out": str(out)})
    looking = f"; next: open {out / PAGE} in a browser" if REPORT in contents.files else ""
    say(f"done: {', '.join(contents.files)} of {one_line(contents.run, 80)} in {out}{looking}")


def fetch(
    source: Annotated[
        str,
        typer.Argument(metavar="URL", help="Where captures lie, such as s3://bucket/study/demo."),
    ],
    out: Annotated[
        Path, typer.Argument(help="Run directory, or another folder; they go to its captures/.")
    ],
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Copy captures from a URL of fsspec's to OUT/captures; what is there already stays."""
    from bract.captures.observation import ObservationStore
    from bract.captures.remote import RemoteStore
    from bract.rundir import RunDirectory

    run = RunDirectory(out)
    with run.claim():
        captures = run.root / "captures"
        store = RemoteStore(source)
        fetched = store.fetch(captures)
    held = len(ObservationStore(captures).folders())
    if output.is_json:
        print_json({"from": store.place, "captures": str(captures), "fetched": fetched})
    say(
        f"done: {len(fetched)} captures fetched, {held} in {captures}; "
        f"next: bract audit {shlex.quote(str(out))}"
    )
