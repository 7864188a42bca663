"""A page beside an earlier one: what it rests on, and what the two conclude."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bract.errors import BractError, one_line
from bract.report.facts import gather
from bract.report.outcome import RECONSTRUCTION, QuestionOutcome, outcome_of
from bract.report.read import read_run
from bract.schema import Answer, Report
from bract.schema.report import ChangeRow, SinceFacts

_NOT_ASKED = "not asked"


def since_facts(root: Path, earlier: Path) -> SinceFacts:
    """Return what changed between an earlier page and that of a run directory.

    Parameters
    ----------
    earlier
        A run directory, or the ``report.json`` of one.

    Raises
    ------
    BractError
        If there is neither.
    """
    before, report = read_earlier(earlier), gather(root)
    old = _results(before, earlier, read_run(earlier).answers if earlier.is_dir() else [])
    new = _results(report, root, read_run(root).answers)
    titles = {row.name: row.title for row in (*before.depends, *report.depends)}
    was = {row.name: row.audited for row in before.depends}
    now = {row.name: row.audited for row in report.depends}
    return SinceFacts(
        run=before.run.name,
        written=before.written,
        depends=[
            ChangeRow(title=title, before=was.get(name, ""), after=now.get(name, ""))
            for name, title in titles.items()
        ],
        results=[
            ChangeRow(
                title=title, before=old.get(title, _NOT_ASKED), after=new.get(title, _NOT_ASKED)
            )
            for title in dict.fromkeys([*old, *new])
        ],
    )


def read_earlier(earlier: Path) -> Report:
    """Return the facts of an earlier page.

    Raises
    ------
    BractError
        If it is no run directory and no ``report.json``.
    """
    if earlier.is_dir():
        return gather(earlier)
    try:
        if earlier.exists() and not earlier.is_file():
            raise OSError("no file")
        return Report.parse_text(earlier.read_bytes(), source=str(earlier))
    except OSError as error:
        raise BractError(
            f"--since {earlier}: {one_line(error, 200)}; expected an earlier run directory, or "
            "its report.json",
            code="file-missing",
        ) from error


def _results(report: Report, root: Path, answers: Sequence[Answer]) -> dict[str, str]:
    """Return what a page concludes, by what it is about."""
    found = {
        f"Reconstruction, {tier.tier} tier": f"{tier.leaked} of {tier.scored} leaked"
        for tier in report.verdict.tiers
        if tier.tried
    }
    outcome = outcome_of(report, answers, root)
    titles = {facts.question: facts.title for facts in report.questions}
    for one in outcome.questions:
        if one.question != RECONSTRUCTION:
            found[titles.get(one.question, one.question)] = _in_words(one)
    if outcome.accuracy is not None:
        found["Accuracy"] = f"{outcome.accuracy:.1%}"
    return found


def _in_words(one: QuestionOutcome) -> str:
    value = "" if one.value is None else f" ({one.value:.2f})"
    return f"{one.level.replace('-', ' ')}{value}"
