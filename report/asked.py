"""What other questions than reconstruction found: a sentence and a table each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bract.audit.questions.rule import Decision, Rule
from bract.audit.questions.rules import RULES
from bract.installed.plugins import PluginError, blaming
from bract.report.order import natural
from bract.schema import Answer
from bract.schema.report import QuestionFacts, Table
from bract.scores.judging import Checked

_SHOWN = frozenset({"schema_version", "question", "input", "refused", "basis", "members"})
"""Fields that every answer has and that are no columns of the table."""


def question_facts(answers: Sequence[Answer], checked: Checked) -> list[QuestionFacts]:
    """Return one entry for each question that has answers, in the order of their names.

    Parameters
    ----------
    checked
        The checks of the run's uploads, which decide what may be concluded.
    """
    found = []
    asked = {answer.question for answer in answers}
    for name in sorted(asked, key=lambda name: (RULES[name].position, name)):
        kind = RULES[name]
        mine = [answer for answer in answers if answer.question == name]
        mine.sort(key=lambda a: (a.tier, a.round or 0, natural(a.client or "")))
        able = [answer for answer in mine if not answer.refused]
        decided = _decided(kind, able, checked)
        found.append(
            QuestionFacts(
                question=name,
                title=kind.title,
                level=decided.level,
                sentence=decided.sentence,
                effort=decided.effort,
                missed=decided.missed,
                unit=kind.unit,
                refused=sorted({a.refused for a in mine if a.refused}),
                table=kind.table(able) or _table(mine),
                parts=kind.parts(able),
                figures=kind.figures(able),
            )
        )
    return found


def _decided(kind: type[Rule[Any]], answers: Sequence[Answer], checked: Checked) -> Decision:
    """Apply a question's rule; one of another package that fails is named in place of a result."""
    try:
        with blaming(kind):
            return kind.conclude(answers, checked)
    except PluginError as error:
        return Decision("failed", f"Not decided: {error}.")


def _table(answers: Sequence[Answer]) -> Table:
    """Return the public single values of answers, a row each."""
    rows = [answer.redact().to_dict() for answer in answers]
    columns = [
        name
        for name in rows[0]
        if name not in _SHOWN
        and name != "schema"
        and any(row[name] is not None for row in rows)
        and all(isinstance(row[name], str | int | float | None) for row in rows)
    ]
    return Table(
        columns=[name.replace("_", " ") for name in columns],
        rows=[[row[name] for name in columns] for row in rows],
    )
