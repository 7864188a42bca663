"""Activities of each process of a run on one time axis, for `bract run --profile`.

Processes of one machine share the kernel's monotonic clock, so their spans are on one time axis.
Each appends to a file of its own in the folder that `FOLDER` names; `merge` makes one trace of them
in the Trace Event Format, which ``chrome://tracing`` and Perfetto open.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.disk.permissions import open_private

FOLDER = "BRACT_TIMELINE"
"""Environment variable with the absolute folder of the spans; nothing is noted without it."""

PARTY = "BRACT_TIMELINE_PARTY"
"""Environment variable with whose process this is, ``client-0`` for example."""


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Note when the block began and how long it took; nothing where no profile is wanted."""
    if FOLDER not in os.environ:
        yield
        return
    began = time.monotonic_ns()
    try:
        yield
    finally:
        note(name, began)


def note(name: str, began: int, ended: int | None = None) -> None:
    """Note a span; ``began`` and ``ended`` are ``time.monotonic_ns()``, now where it is None."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    pid = os.getpid()
    ended = time.monotonic_ns() if ended is None else ended
    whose = f"{os.environ.get(PARTY, '')} {Path(sys.argv[0]).name}".strip()
    fields = {"name": name, "pid": pid, "ts": began // 1000, "dur": (ended - began) // 1000}
    line = json.dumps({**fields, "process": whose}) + "\n"
    # A profile is worth less than the run that it is of.
    with (
        contextlib.suppress(OSError),
        open(Path(folder) / f"{pid}.jsonl", "a", opener=open_private) as file,
    ):
        file.write(line)


def merge(folder: Path, target: Path) -> Path:
    """Write what the processes noted in ``folder`` as one trace, and remove the folder.

    Returns
    -------
    Path
        ``target``: a JSON object with ``traceEvents``, sorted by time, in microseconds from the
        first one on.
    """
    from bract.disk.files import (
        write_text,  # brings torch, which most of Flower's processes do without
    )

    spans: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            # The last line of a process that was killed may be half a line.
            with contextlib.suppress(ValueError):
                spans.append(json.loads(line))
    spans.sort(key=lambda found: found["ts"])
    start = spans[0]["ts"] if spans else 0
    names = {found["pid"]: found.pop("process") for found in spans}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
        for pid, name in names.items()
    ]
    events += [{**s, "ph": "X", "tid": s["pid"], "ts": s["ts"] - start} for s in spans]
    written = write_text(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    shutil.rmtree(folder, ignore_errors=True)
    return written
