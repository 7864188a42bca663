"""List what a page rests on, and until when: after a change, or that day, audit the run again."""

from __future__ import annotations

import calendar
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from hashlib import sha256

from bract.config.audit import ReportConfig
from bract.errors import listed
from bract.installed.versions import audit_code
from bract.report.order import natural
from bract.report.read import RunFiles
from bract.schema import Answer, ObservationFile
from bract.schema.account import LeftFacts
from bract.schema.reach import ExamineFacts
from bract.schema.report import DependRow, RunFacts
from bract.schema.report_rows import ObservationFacts

_SHOWN = 6


def depend_rows(
    files: RunFiles, observations: Sequence[ObservationFacts], left: LeftFacts
) -> list[DependRow]:
    """Return what the page rests on: a short text or digest each.

    The digest of the code is held against this installation's. All else is of the training, and is
    compared with another page (`bract.report.since`).
    """
    bases = [found.basis for found in (*observations, *files.answers) if found.basis]
    versions = files.run.versions if files.run else {}
    captures = files.captures
    declared = [capture.declaration for capture in captures]
    rows = [
        DependRow(
            name="code",
            title="bract's code that attacks and scores",
            audited=_several(basis.get("code") for basis in bases),
            now=audit_code() if bases else None,
        ),
        DependRow(
            name="libraries",
            title="libraries that results are computed with",
            audited=_several(basis.get("libraries") for basis in bases),
        ),
        DependRow(
            name="model",
            title="model, its inputs and loss",
            audited=_several(
                f"{d.model}, {d.input} {'x'.join(map(str, d.image_shape or ()))}, {d.loss}"
                for d in declared
            ),
        ),
        DependRow(
            name="training",
            title="local training (digest)",
            audited=_digest({_training(capture) for capture in captures}),
        ),
        DependRow(name="flower", title="Flower", audited=versions.get("flwr", "")),
        DependRow(
            name="protection",
            title="defenses and encryption",
            audited=_several(
                f"{', '.join(str(e.get('name')) for e in d.defenses) or 'none'}; {d.encryption}"
                for d in declared
            ),
        ),
        DependRow(
            name="policy",
            title="what replies hold, which the sites' policies decide (digest)",
            audited=_digest({f"{row.record} {row.name} {row.policy}" for row in left.rows}),
        ),
        DependRow(name="data", title="examples of each client", audited=_examples(captures)),
    ]
    return [row for row in rows if row.audited]


def examine_facts(files: RunFiles, run: RunFacts, months: int | None = None) -> ExamineFacts:
    """Return the day of the oldest result, and the day by which a next one is due.

    Parameters
    ----------
    months
        Months between the two; None takes the configuration's, or 12 without one.
    """
    if months is None:
        section = files.config.report if files.config else ReportConfig()
        months = section.examine_again_months
    results: Sequence[Answer] = [*(audit for _, audit in files.audits), *files.answers]
    if not results:
        return ExamineFacts(months=months)
    earlier = run.finished or run.last_upload
    days = [day for one in results if (day := _day(one.made or earlier)) is not None]
    if not days:
        return ExamineFacts(months=months)
    examined = min(days)
    due = later(examined, months)
    return ExamineFacts(
        examined=examined.isoformat(),
        months=months,
        due=due.isoformat(),
        overdue=today() > due,
    )


def today() -> date:
    """Return the day of this machine's clock, in UTC."""
    return datetime.now(UTC).date()


def later(day: date, months: int) -> date:
    """Return the same day some months later; the month's last where it has no such day."""
    years, month = divmod(day.month - 1 + months, 12)
    year, month = day.year + years, month + 1
    return date(year, month, min(day.day, calendar.monthrange(year, month)[1]))


def _day(moment: str | None) -> date | None:
    """Return the day of ISO 8601 text; None of other text, and of years that have no date."""
    try:
        found = datetime.fromisoformat(moment) if moment else None
    except ValueError:
        return None
    if found is None or found.year > 9000:
        return None
    return found.date()


def _training(capture: ObservationFile) -> str:
    d = capture.declaration
    return f"{d.optimizer} {d.lr} {d.momentum} {d.batch_size} {d.local_steps}"


def _examples(captures: Sequence[ObservationFile]) -> str:
    counts: dict[str, int] = {}
    for capture in captures:
        if capture.declaration.num_examples is not None:
            counts[capture.client] = capture.declaration.num_examples
    return listed([f"{name} {counts[name]}" for name in sorted(counts, key=natural)], most=_SHOWN)


def _several(values: Iterable[str | None]) -> str:
    found = dict.fromkeys(value for value in values if value)
    return listed(list(found), most=_SHOWN) if found else ""


def _digest(parts: set[str]) -> str:
    if not parts:
        return ""
    return sha256(json.dumps(sorted(parts)).encode()).hexdigest()[:16]
