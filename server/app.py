"""The ServerApp: run the configured federation and leave a run directory behind."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bract.config import FederationConfig, config_of_run
from bract.errors import BractError
from bract.logs import log_to_file, log_to_stderr
from bract.rundir import RunDirectory
from bract.server.encrypted import EncryptedFederation
from bract.server.federation import Federation
from bract.server.grid import PromptGrid
from bract.versions import package_versions

_log = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds; called by Flower."""
    log_to_stderr()
    config = config_of_run(context.run_config)
    own_folder = Path("runs") / f"{config.name}-{context.run_id}"
    run = RunDirectory(str(context.run_config.get("run-dir") or own_folder))
    run.create(config)
    with run.serve(), log_to_file(run.logs / "server.log"):
        run.update_state(
            status="running",
            started=time.time(),
            flower_run_id=str(context.run_id),
            versions=package_versions(),
        )
        try:
            _federation(config, run).train(PromptGrid(grid))
        except Exception as error:
            expected = isinstance(error, BractError)
            reason = str(error) if expected else f"{type(error).__name__}: {error}"
            _log.error("the run failed: %s", reason, exc_info=not expected)
            # Where the disk is full, this error is the last to say so.
            with contextlib.suppress(BractError):
                run.update_state(status="failed", finished=time.time(), error=reason)
            raise
        run.update_state(status="finished", finished=time.time())


def _federation(config: FederationConfig, run: RunDirectory) -> Federation:
    kind = EncryptedFederation if config.encryption.enabled else Federation
    return kind(config, run)
