"""Compute when a run was examined, and by when it is to be examined again."""

from __future__ import annotations

import calendar
from collections.abc import Sequence
from datetime import UTC, date, datetime

from bract.config.report import ReportConfig
from bract.report.read import RunFiles
from bract.schema import Answer
from bract.schema.reach import ExamineFacts
from bract.schema.report import RunFacts


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
