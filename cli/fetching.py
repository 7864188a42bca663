"""``bract fetch``: copy captures from a URL, so that an audit reads them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bract.cli.console import print_json, say
from bract.cli.options import Format, FormatOption


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
    from bract.protocol.observation import ObservationStore
    from bract.protocol.remote import RemoteStore
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
