"""``bract demo``: the whole way from a clone to a report."""

from __future__ import annotations

from pathlib import Path

from bract.cli.audit import audit_requests, audit_run
from bract.cli.console import say
from bract.cli.launch.launcher import Launch
from bract.cli.launch.processes import Processes
from bract.cli.report import report_run
from bract.cli.run import run_federation
from bract.config import FederationConfig


def run_demo(
    config: FederationConfig, runs: Path, processes: Processes, *, as_json: bool = False
) -> Path:
    """Train, attack and report; return the page's path."""
    say(f"1/3 a federation of {config.clients} clients learns {config.data.name}")
    run = run_federation(config, runs, Launch(processes=processes), overwrite=True)
    say("2/3 the server attacks what it captured")
    for request in audit_requests(run.root):
        audit_run(run.root, request)
    say("3/3 the report")
    return report_run(run.root, redact=False, as_json=as_json)
