"""What ran, when and where: by the run's own record, and by the captures where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from bract.report.order import total
from bract.report.read import RunFiles
from bract.schema import ObservationFile
from bract.schema.report import RunFacts
from bract.schema.report_rows import ObservationFacts


def run_facts(files: RunFiles, observations: Sequence[ObservationFacts]) -> RunFacts:
    """Return the facts of a run; those of a third-party app are what its captures hold."""
    run, config, captures = files.run, files.config, files.captures
    trained = [row.round for row in files.metrics if row.round > 0]
    received = [c.provenance.received for c in captures if c.provenance.received is not None]
    return RunFacts(
        name=(run and run.name) or (config and config.name) or files.root.resolve().name,
        status=run.status if run else "captured" if captures else "unknown",
        model=config.model.name if config else _one(c.declaration.model for c in captures),
        data=config.data.name if config else None,
        inputs=sorted({c.declaration.input for c in captures}),
        rounds_done=max(trained or (c.round for c in captures), default=0),
        rounds_planned=config.rounds if config else None,
        started=_when(run.started) if run else None,
        finished=_when(run.finished) if run else None,
        first_upload=_when(min(received, default=None)),
        last_upload=_when(max(received, default=None)),
        training_seconds=total(row.seconds for row in files.metrics),
        audit_seconds=total(o.seconds for o in observations),
        device=run.device if run else None,
        audit_devices=sorted({o.device for o in observations if o.device}),
        command=run.command if run else None,
        flower_run_id=run.flower_run_id if run else _run_ids(captures),
        versions=run.versions if run else {},
        seed=config.seed if config else None,
        audit_seeds=sorted({o.seed for o in observations if o.seed is not None}),
    )


def _one(names: Iterable[str | None]) -> str | None:
    """Return what all captures declare, or several names in a row; None where none does."""
    found = dict.fromkeys(name for name in names if name)
    return ", ".join(found) or None


def _run_ids(captures: Sequence[ObservationFile]) -> str | None:
    return _one(c.provenance.run_id for c in captures)


def _when(moment: float | None) -> str | None:
    """Return seconds since the epoch as ISO 8601 text; None for a moment that has no date."""
    if moment is None:
        return None
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return None
