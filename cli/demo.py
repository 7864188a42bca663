"""``bract demo``: the whole way from a clone to a report."""

from __future__ import annotations

from pathlib import Path

from bract.cli.auditing import audit_run, choose_audits
from bract.cli.console import say
from bract.cli.launcher import Launch
from bract.cli.reporting import report_run
from bract.cli.templates import demo_config
from bract.cli.training import run_federation


def run_demo(runs: Path) -> Path:
    """Train, attack and report; return the page's path."""
    config = demo_config()
    say("1/3 a federation of three clients learns handwritten digits")
    run = run_federation(config, runs, Launch(), overwrite=True)
    say("2/3 the server attacks what it captured")
    for choice in choose_audits(run.root):
        audit_run(run.root, choice)
    say("3/3 the report")
    return report_run(run.root, redact=False, as_json=False)
