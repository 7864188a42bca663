"""``bract report``: write the page, the facts and the summary of a run."""

from __future__ import annotations

import json
from pathlib import Path

from bract.cli.console import print_json, say
from bract.rundir import RunDirectory


def report_run(
    root: Path,
    *,
    redact: bool | None,
    as_json: bool,
    as_pdf: bool = False,
    since: Path | None = None,
    months: int | None = None,
) -> Path:
    """Write ``report.html``, ``report.json`` and ``summary.html`` of a run; return the page's path.

    ``as_pdf`` prints the summary to ``summary.pdf`` too. ``redact`` is as in `write_report`;
    ``since`` is an earlier run directory, or its ``report.json``; ``months`` are those to the next
    examination.

    Raises
    ------
    LockedError
        If another command trains, audits or reports the run.
    """
    from bract.cli.printing import print_to_pdf
    from bract.report import write_report
    from bract.report.page.render import SUMMARY
    from bract.report.since import since_facts

    run = RunDirectory.open(root)
    with run.claim():
        facts_since = None if since is None else since_facts(run.root, since)
        page = write_report(run.root, redact=redact, since=facts_since, months=months)
        summary = run.root / SUMMARY
        if as_pdf:
            summary = print_to_pdf(summary)
    facts = json.loads((run.root / "report.json").read_text(encoding="utf-8"))
    if as_json:
        print_json(facts)
    if redact is None and facts["redacted"]:
        say("texts are left out of the page; --show shows what was recovered beside the originals")
    if facts["examine"]["overdue"]:
        say(f"the run was to be examined again by {facts['examine']['due']}: audit it anew")
    say(f"done: {page}; next: open it in a browser; for data protection: {summary}")
    return page
