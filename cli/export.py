"""``bract export``: a run's figures by round for TensorBoard or MLflow. No picture goes there.

What leaves is what a redacted report holds: MLflow may run on another party's machine. The run may
have been made by another party, too: no name in it becomes a path.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

from bract.cli.console import print_json, say
from bract.disk.permissions import make_private_folder, open_private
from bract.errors import BractError, RunFailedError, one_line, without_credentials
from bract.registry import unknown
from bract.report.facts import gather
from bract.report.series import Figure, figures_by_round, part_of_name, settings
from bract.rundir import RunDirectory
from bract.schema import Report


def export_run(root: Path, to: str, where: str | None, *, as_json: bool = False) -> str:
    """Write a run's figures by round for another tool; return where they are.

    Parameters
    ----------
    to
        ``tensorboard`` or ``mlflow``.
    where
        TensorBoard's log folder or MLflow's tracking URI; None takes one in the run's folder.
    as_json
        Print where they are, and how many, to stdout.

    Raises
    ------
    BractError
        If ``root`` is no run, the tool is unknown or not installed, or there is nothing to write.
    RunFailedError
        If the tool does not take the figures.
    """
    writers = {"tensorboard": _to_tensorboard, "mlflow": _to_mlflow}
    if to not in writers:
        raise BractError(unknown("target of --to", to, list(writers)), code="unknown-name")
    run = RunDirectory.open(root)
    report = gather(run.root).redact()
    figures = list(figures_by_round(report))
    if not figures:
        raise BractError(
            f"{run.root}: no round has any figure yet; train or audit it first", code="file-missing"
        )
    try:
        written = writers[to](run, report, figures, where)
    except BractError:
        raise
    except Exception as error:
        raise RunFailedError(
            f"--to {to}: {type(error).__name__}: {one_line(without_credentials(error), 300)}"
        ) from error
    shown = without_credentials(written)
    if as_json:
        print_json({"to": to, "where": shown, "figures": len(figures)})
    say(f"done: {len(figures)} figures in {shown}")
    return written


def _to_tensorboard(
    run: RunDirectory, report: Report, figures: list[Figure], where: str | None
) -> str:
    writer_of = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
    folder = Path(where) if where else _own(run.root / "tensorboard")
    with writer_of(str(make_private_folder(_own(folder / _name(report))))) as writer:
        for figure in figures:
            writer.add_scalar(figure.name, figure.value, figure.round)
        facts = {"name": report.run.name, "status": report.run.status} | settings(report)
        # Indented, so that TensorBoard shows it as it is rather than as Markdown with its links.
        lines = [f"    {name}: {one_line(value)}" for name, value in facts.items()]
        writer.add_text("run", "\n".join(lines))
    say(f"look at it with: tensorboard --logdir {folder}")
    return str(folder)


def _to_mlflow(run: RunDirectory, report: Report, figures: list[Figure], where: str | None) -> str:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = _needed("mlflow", "mlflow")
    entities = importlib.import_module("mlflow.entities")
    uri = where or f"sqlite:///{_database(run)}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name("bract")
    experiment = found.experiment_id if found else client.create_experiment("bract")
    now = int(1000 * time.time())
    one = client.create_run(experiment, run_name=_name(report))
    metrics = [entities.Metric(f.name, f.value, now, f.round) for f in figures]
    params = [entities.Param(name, value[:500]) for name, value in settings(report).items()]
    tags = [entities.RunTag("bract.status", report.run.status)]
    for start in range(0, len(metrics), _BATCH):
        client.log_batch(one.info.run_id, metrics=metrics[start : start + _BATCH])
    for start in range(0, len(params), _PARAMS):
        client.log_batch(one.info.run_id, params=params[start : start + _PARAMS], tags=tags)
    client.set_terminated(one.info.run_id, "FINISHED")
    say(f"look at it with: mlflow ui --backend-store-uri {without_credentials(uri)}")
    return uri


_BATCH = 1000
_PARAMS = 100
"""Metrics, and parameters, that MLflow takes at once."""


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BractError(
            f"--to {extra}: {error}; install it with: pip install 'bract[{extra}]'",
            code="package-missing",
        ) from error


def _database(run: RunDirectory) -> Path:
    """Return where MLflow keeps its SQLite file, which is made here for its mode."""
    path = _own(run.root / "mlflow.db")
    os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    return path.absolute()


def _own(path: Path) -> Path:
    """Return a place in a run's folder, which must be no link to somewhere else."""
    if path.is_symlink():
        raise BractError(
            f"{path}: is a link, which is not followed; remove it or give --where",
            code="file-unwritable",
        )
    return path


def _name(report: Report) -> str:
    return part_of_name(report.run.name)
