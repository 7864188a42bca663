"""``bract release``: hold a run's results against limits, and write the sheet for its model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bract.audit.questions.reconstruction.rule import ReconstructionRule
from bract.cli.console import print_json, say
from bract.cli.gate import Gate, hold, rule_of
from bract.cli.printing import print_to_pdf
from bract.errors import LeakageError, listed
from bract.report.read import read_run
from bract.report.release import write_release
from bract.report.words.formatting import plural
from bract.rundir import RunDirectory
from bract.schema import Answer
from bract.schema.release import LimitRow

MEMBERSHIP = "membership>0.05@1%"
"""The limit where membership was asked and none was named."""


def release_run(
    root: Path,
    *,
    files: Sequence[Path],
    limits: Sequence[str],
    as_json: bool = False,
    as_pdf: bool = False,
    months: int | None = None,
) -> Path:
    """Write ``release.json`` and ``release.html`` of a run; return the page's path.

    Parameters
    ----------
    files
        What goes out; without any the final model below ``models/``, if it is there.
    limits
        Gates, as ``bract audit --fail-on`` reads them; without any `usual_limits`.
    months
        Months from the audit to the next one; None takes the configuration's.

    Raises
    ------
    LeakageError
        After the sheet was written, if a limit did not hold.
    """
    gates = [Gate.parse(text) for text in limits]
    run = RunDirectory.open(root)
    found = read_run(run.root)
    answers: list[Answer] = [*(audit for _, audit in found.audits), *found.answers]
    gates = gates or [Gate.parse(text) for text in usual_limits(answers)]
    rule = rule_of(run.root)
    rows = []
    for gate in gates:
        judgement = gate.judge(answers, rule)
        found_of = str(judgement).partition(": ")[2]
        if judgement.crossed:
            found_of = (
                f"{plural(len(judgement.crossed), 'result')} crossed it: "
                f"{listed(judgement.crossed)}"
            )
        rows.append(
            LimitRow(
                limit=str(gate),
                meaning=gate.in_words(),
                tier=gate.tier,
                passed=judgement.passed,
                found=found_of,
            )
        )
    final = run.models / "final.safetensors"
    with run.claim():
        out = files or ([final] if final.is_file() else [])
        sheet, page = write_release(run.root, rows, out, months=months)
        if as_pdf:
            page = print_to_pdf(page)
    if as_json:
        print_json(json.loads(sheet.to_text()))
    say(f"{'done' if sheet.passed else 'not passed'}: {page}; next: read it, and sign it or not")
    hold(gates, answers, rule)
    if not sheet.passed:
        raise LeakageError(f"{page}: {sheet.open_points[0]}")
    return page


def usual_limits(answers: Sequence[Answer]) -> list[str]:
    """Return a limit for each tier that was tried, and for membership where it was asked."""
    able = [answer for answer in answers if not answer.refused]
    tiers = dict.fromkeys(a.tier for a in able if a.question == ReconstructionRule.name)
    asked = any(answer.question == "membership" for answer in able)
    return [*(f"leaked>0@{tier}" for tier in tiers), *([MEMBERSHIP] if asked else [])]
