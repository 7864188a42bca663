"""The ServerApp: run the configured federation and leave a run directory behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import bract
from bract.config import FederationConfig
from bract.config.config import config_of_run
from bract.errors import BractError, contained
from bract.installed.versions import package_versions
from bract.process.freed_memory import return_freed_memory
from bract.process.logs import log_to_file, log_to_stderr
from bract.protocol.progress import Progress, ProgressWriter
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow
from bract.server.capture_folders import run_folder
from bract.server.encrypted import EncryptedFederation
from bract.server.federation import Federation
from bract.server.grid import PromptGrid
from bract.server.spool import SpoolingGrid

_log = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds; called by Flower.

    A run that was submitted without a folder, so perhaps from another machine, is reported in
    Flower's log (`bract.protocol.progress`).
    """
    log_to_stderr()
    return_freed_memory()
    if context.run_config.get("run-dir"):
        _train(grid, context, _keep_quiet)
        return
    writer = ProgressWriter(bract.__version__)
    try:
        _train(grid, context, writer.write)
    except Exception as error:
        writer.write(Progress(event="failed", error=_reason(error)))
        raise
    writer.write(Progress(event="finished"))


def _train(grid: Grid, context: Context, report: Callable[[Progress], None]) -> None:
    # Who submits a run is the SuperLink's operator, whose ServerApp runs here in any case.
    config = config_of_run(context.run_config).as_own_word()
    named = context.run_config.get("run-dir")
    folder = Path(str(named)) if named else run_folder(config.name, context.run_id)
    run = _ReportedRun(folder.absolute(), report)
    run.create(config)
    report(
        Progress(
            event="training",
            name=config.name,
            rounds=config.rounds,
            clients=config.clients,
            run=str(run.root),
        )
    )
    with run.serve(), log_to_file(run.logs / "server.log"):
        run.update_state(
            status="running",
            started=time.time(),
            flower_run_id=str(context.run_id),
            versions=package_versions(),
        )
        try:
            with contained():
                _federation(config, run).train(PromptGrid(SpoolingGrid(grid, run.root)))
        except (SystemExit, KeyboardInterrupt):
            raise
        except Exception as error:
            reason = _reason(error)
            _log.error("the run failed: %s", reason, exc_info=not isinstance(error, BractError))
            # If the disk is full, this log line is the last one that can be written.
            with contextlib.suppress(BractError):
                run.update_state(status="failed", finished=time.time(), error=reason)
            raise
        except BaseException:  # by which Flower ends the app of a run that was stopped
            _log.error("the run was stopped")
            with contextlib.suppress(BractError):
                run.update_state(status="stopped", finished=time.time())
            raise
        run.update_state(status="finished", finished=time.time())


class _ReportedRun(RunDirectory):
    """A run directory whose rounds are also reported in the log."""

    def __init__(self, root: Path, report: Callable[[Progress], None]) -> None:
        super().__init__(root)
        self._report = report

    def append_metrics(self, row: MetricsRow) -> None:
        super().append_metrics(row)
        self._report(Progress(event="round", row=row))


def _keep_quiet(_: Progress) -> None:
    """Report nothing: the submitter reads the run directory."""


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BractError) else f"{type(error).__name__}: {error}"


def _federation(config: FederationConfig, run: RunDirectory) -> Federation:
    kind = EncryptedFederation if config.encryption.uses_paillier else Federation
    return kind(config, run)
