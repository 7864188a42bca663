"""The sheet that goes with a released model: limits that held, files, and what is not covered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import file_digest
from pathlib import Path

from bract import __version__
from bract.disk.files import write_text
from bract.errors import BractError, one_line
from bract.report.facts import gather
from bract.report.page.render import style, templates
from bract.report.words.formatting import counted, noun_of
from bract.report.words.headline import finding
from bract.report.words.left import openly, sent_openly
from bract.report.words.reach import KNOWS, examined_again, likeness, reach_lines, reach_note
from bract.report.words.summary import changes, not_tried
from bract.report.words.threats import ANY_MEMBERSHIP, FINAL_MEMBERSHIP
from bract.schema import Report
from bract.schema.release import AskedRow, FileRow, LimitRow, ReleaseSheet, TierRow

RELEASE = "release.html"


def write_release(
    run_dir: Path,
    limits: Sequence[LimitRow],
    files: Sequence[Path],
    *,
    months: int | None = None,
) -> tuple[ReleaseSheet, Path]:
    """Write ``release.json`` and ``release.html`` into a run directory; return sheet and page.

    Parameters
    ----------
    limits
        What each limit found, in the order of the sheet.
    files
        What goes out.
    months
        As in `gather`.

    Raises
    ------
    BractError
        If a file cannot be read; nothing is written then.
    """
    report = gather(run_dir, months=months)
    sheet = sheet_of(report, limits, [_file_row(path) for path in files])
    write_text(run_dir / "release.json", sheet.to_text(ascii_only=False) + "\n")
    page = (
        templates()
        .get_template("release.html.j2")
        .render(
            sheet=sheet,
            reach=reach_lines(sheet.reach, openly(report.left)),
            reach_note=reach_note(sheet.reach, report.verdict.thresholds.level),
            likeness=likeness(sheet.reach),
            knows=KNOWS,
            examined_again=examined_again(sheet.examine),
            css=style("summary.css"),
        )
    )
    return sheet, write_text(run_dir / RELEASE, page)


def sheet_of(report: Report, limits: Sequence[LimitRow], files: Sequence[FileRow]) -> ReleaseSheet:
    """Return the sheet of a run's facts."""
    tiers = [
        TierRow(
            tier=one.tier,
            tried=one.tried,
            needed=one.needed,
            limited=bool(about := [limit for limit in limits if limit.tier in (None, one.tier)]),
            passed=one.tried and bool(about) and all(limit.passed for limit in about),
            sentence=f"{counted(one, one.noun)}. {one.sentence}" if one.scored else one.sentence,
        )
        for one in report.verdict.tiers
    ]
    noun = noun_of([*report.run.inputs, *(o.input for o in report.observations)])
    unlimited = [row.tier for row in tiers if row.tried and not row.limited]
    open_points = [
        *(f"Limit {one.limit} not passed: {one.found}." for one in limits if not one.passed),
        *(
            f"{counted(one, one.noun)} in the {one.tier} tier, and no limit is about it."
            for one in report.verdict.tiers
            if one.leaked and one.tier in unlimited
        ),
        *(f"The {one.tier} tier was not tried." for one in tiers if one.needed and not one.tried),
        *(
            f"Changed since the audit: {row.title}, {row.audited} then, {row.now} now."
            for row in report.depends
            if row.stale
        ),
        *([f"Not examined: {unread}."] if (unread := report.threat_model.unread) else []),
        *([examined_again(report.examine)] if report.examine.overdue else []),
        *([] if limits else ["No limit was set, and nothing that was found has one."]),
        *(_unexamined(report) if files else ["No file is named that goes out."]),
    ]
    return ReleaseSheet(
        bract=__version__,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        run=report.run.name,
        passed=not open_points,
        open_points=open_points,
        finding=finding(report.verdict.sentence, report.verdict.level, sent_openly(report.left)),
        limits=list(limits),
        tiers=tiers,
        questions=[
            AskedRow(title=q.title, level=q.level, sentence=q.sentence, missed=q.missed)
            for q in report.questions
        ],
        files=list(files),
        final_examined=not _unexamined(report),
        reach=report.reach,
        examine=report.examine,
        not_covered=[
            *not_tried(report),
            *(reason for q in report.questions for reason in q.refused),
        ],
        changes=changes(report, noun),
        depends=report.depends,
    )


def _unexamined(report: Report) -> list[str]:
    """Return what says that nobody asked the final model itself; empty where somebody did."""
    if {ANY_MEMBERSHIP, FINAL_MEMBERSHIP}.isdisjoint(report.threat_model.not_tried):
        return []
    asked = any(q.question == "membership" and q.refused for q in report.questions)
    return [
        "Whose records trained the model that goes out could not be told: the reason is under what "
        "was not tried."
        if asked
        else "Whose records trained the model that goes out was not asked: `bract audit RUN "
        "--question membership` asks it, with --final FILE where the run has no final model."
    ]


def _file_row(path: Path) -> FileRow:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("neither a file nor a folder")
        with path.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        return FileRow(name=path.name, size=path.stat().st_size, sha256=found)
    except OSError as error:
        raise BractError(
            f"--file {path}: {one_line(error, 200)}; expected a file that goes out",
            code="file-missing",
        ) from error
