"""A command: ``bract uploads``, which counts what a run captured of each client."""

from __future__ import annotations

from collections import Counter

from bract.captures.observation import ObservationStore
from bract.cli.console import print_json, say
from bract.cli.options import Format, FormatOption, RunArgument


def uploads(run: RunArgument, output: FormatOption = Format.DEFAULT) -> None:
    """Count the captured uploads of each client of RUN."""
    found = Counter(seen.client for seen in ObservationStore(run / "captures"))
    if output.is_json:
        print_json(found)
    for client, count in sorted(found.items()):
        say(f"{client}: {count}")
