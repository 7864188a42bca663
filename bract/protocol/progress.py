"""A server app's reports to a follower on another machine: lines in Flower's log.

Flower brings all that a server app prints to a follower of its run, also text that clients chose.
A line counts only if it begins with the token of the first one, which is drawn at random and
printed before any client was asked; clients do not see the log. ::

    bract-0f...e2 {"event": "begun", "bract": "0.1.0"}
    bract-0f...e2 {"event": "training", "run": "/srv/runs/demo-17", "rounds": 5, ...}
    bract-0f...e2 {"event": "round", "row": {...}}
    bract-0f...e2 {"event": "finished"}
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any, Literal

from bract.errors import BractError
from bract.parse.strict_json import json_ready, parse_json
from bract.schema.metrics import MetricsRow
from bract.schema.record import Record, RecordError

LONGEST = 1 << 22
"""Characters of the longest line that is read."""

_LINE = re.compile(r"bract-([0-9a-f]{32}) (\{.*)", re.ASCII)


class Progress(Record):
    """One report of a server app.

    Attributes
    ----------
    event
        ``begun`` comes first, ``finished`` or ``failed`` last.
    bract
        The version that the server runs.
    name, rounds, clients
        Of the federation, once its configuration was read.
    run
        The run directory on the server's machine.
    row
        A round's row of `metrics.jsonl`.
    error
        Why the run failed.
    """

    event: Literal["begun", "training", "round", "finished", "failed"]
    bract: str | None = None
    name: str | None = None
    rounds: int | None = None
    clients: int | None = None
    run: str | None = None
    row: MetricsRow | None = None
    error: str | None = None


class ProgressWriter:
    """Print lines for a follower of the run; the first one at once."""

    def __init__(self, version: str) -> None:
        self._token = secrets.token_hex(16)
        self.write(Progress(event="begun", bract=version))

    def write(self, progress: Progress) -> None:
        """Print one line."""
        content = json_ready(progress.model_dump(mode="json", by_alias=True, exclude_defaults=True))
        if progress.row is not None:
            content["row"] = json_ready(progress.row.to_dict())
        text = json.dumps(content, allow_nan=False)
        # In one piece, and on a line of its own where another thread had begun one.
        sys.stdout.write(f"\nbract-{self._token} {text}\n")


class ProgressReader:
    """Find a server app's reports in the pieces of its log."""

    def __init__(self) -> None:
        self._token: str | None = None
        self._rest = ""
        self._skipping = False

    def feed(self, text: str) -> Iterator[Progress | str]:
        """Return the reports in the lines that end in ``text``; any other line unchanged."""
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            if line.strip():
                yield self._read(line)
        if len(self._rest) > LONGEST:
            self._rest, self._skipping = "", True

    def _read(self, line: str) -> Progress | str:
        found = _LINE.fullmatch(line)
        if found is None or self._token not in (None, found[1]):
            return line
        try:
            content: Any = parse_json(found[2], most=LONGEST)
            progress = Progress.parse(content, source="the server's progress")
        except (BractError, RecordError) as error:
            if self._token is None:
                return line
            raise BractError(
                f"the server's progress cannot be read ({error}); the server and this "
                "machine must run the same version of bract",
                code="message-malformed",
            ) from error
        if self._token is None and progress.event != "begun":
            return line
        self._token = found[1]
        return progress
