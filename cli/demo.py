"""``bract demo``: the whole way from a clone to a report."""

from __future__ import annotations

from pathlib import Path

from bract.cli.audit import audit_run, choose_audits
from bract.cli.console import say
from bract.cli.launch.launcher import Launch
from bract.cli.report import report_run
from bract.cli.run import run_federation
from bract.cli.templates import demo_config


def run_demo(runs: Path, *, quick: bool = False, as_json: bool = False) -> Path:
    """Train, attack and report; return the page's path."""
    config = demo_config(quick=quick)
    say("1/3 a federation of three clients learns handwritten digits")
    run = run_federation(config, runs, Launch(), overwrite=True)
    say("2/3 the server attacks what it captured")
    for choice in choose_audits(run.root):
        audit_run(run.root, choice)
    say("3/3 the report")
    return report_run(run.root, redact=False, as_json=as_json)
