"""``bract report``: write the page and the facts of a run."""

from __future__ import annotations

import json
from pathlib import Path

from bract.cli.console import print_json, say
from bract.rundir import RunDirectory


def report_run(root: Path, *, redact: bool, as_json: bool) -> Path:
    """Write ``report.html`` and ``report.json`` of a run; return the page's path.

    Raises
    ------
    LockedError
        If another command trains, audits or reports the run.
    """
    from bract.report import write_report

    run = RunDirectory.open(root)
    with run.claim():
        page = write_report(run.root, redact=redact)
    if as_json:
        print_json(json.loads((run.root / "report.json").read_text(encoding="utf-8")))
    say(f"done: {page}; next: open it in a browser")
    return page
