"""``bract demo``: the whole way from a clone to a report."""

from __future__ import annotations

import time
from pathlib import Path

from bract.cli.audit import audit_run
from bract.cli.audit_requests import audit_requests
from bract.cli.console import say
from bract.cli.launch.launcher import Launch
from bract.cli.launch.processes import Processes
from bract.cli.report import report_run
from bract.cli.run import prepare_run, run_federation
from bract.config import FederationConfig
from bract.errors import in_words
from bract.installed import flower
from bract.rundir import RunDirectory


def run_demo(
    config: FederationConfig, runs: Path, processes: Processes | None, *, as_json: bool = False
) -> Path:
    """Train, attack and report; return the page's path.

    Parameters
    ----------
    processes
        Of a federation that is being started; None trains in this process, for a Flower whose
        processes bract has no rules for.
    """
    say(f"1/3 a federation of {config.clients} clients learns {config.data.name}")
    if processes is None:
        run = _train_here(config, runs)
    else:
        run = run_federation(config, runs, Launch(processes=processes), overwrite=True)
    say("2/3 the server attacks what it captured")
    for request in audit_requests(run.root):
        audit_run(run.root, request)
    say("3/3 the report")
    return report_run(run.root, redact=False, as_json=as_json)


def _train_here(config: FederationConfig, runs: Path) -> RunDirectory:
    from bract.runtime.in_process import train_here

    say(
        f"Flower {flower.installed()}: bract's runtime is for {' and '.join(flower.SERIES)}, so "
        "clients and server run in this process, one after another"
    )
    config = config.as_own_word()
    run = RunDirectory(runs / config.name)
    with run.claim():
        prepare_run(run, config, overwrite=True)
        try:
            train_here(config, run)
        except BaseException as error:
            run.update_state(status="failed", error=in_words(error), finished=time.time())
            raise
    return run
