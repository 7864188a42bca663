"""What the page of one run concludes, in numbers: for tools that compare many runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bract.audit.questions.rules import RULES
from bract.report.comparison.variants import ExampleCounts, Variant, variant_row
from bract.report.facts import gather
from bract.report.order import strength
from bract.report.read import read_run
from bract.schema import Answer, Report
from bract.schema.comparison import DefenseWords
from bract.schema.report_rows import AttackRow

RECONSTRUCTION = "reconstruction"


@dataclass(frozen=True)
class QuestionOutcome:
    """What the page concludes of one question.

    Attributes
    ----------
    value
        In [0, 1]: of a reconstruction the mean primary score of the closest attack, of another
        question the largest number that its gate compares; None where nothing was judged.
    level
        The question's own decision, such as ``leaked`` or ``none-leaked``.
    leaked, scored
        Examples that leaked to the strongest attack, of those that could be judged.
    attack
        That attack, and its tier.
    missed
        How large a leak could have been missed, in words; empty of a reconstruction.
    """

    question: str
    value: float | None
    level: str
    leaked: int = 0
    scored: int = 0
    attack: str = ""
    missed: str = ""


@dataclass(frozen=True)
class RunOutcome:
    """What the page of one run concludes.

    Attributes
    ----------
    accuracy
        Of the global model after the last round; of the clients' where only they have one.
    seconds
        Median wall time of a round.
    bytes
        Mean size of an upload.
    """

    accuracy: float | None
    seconds: float | None
    bytes: float | None
    questions: tuple[QuestionOutcome, ...]


def run_outcome(root: Path, *, locked: bool = False) -> RunOutcome:
    """Return what the report of a run directory concludes.

    Parameters
    ----------
    locked
        Whether a defense keeps part of the model at each client, so that only the clients' accuracy
        means anything.
    """
    return outcome_of(gather(root), read_run(root).answers, root, locked=locked)


def outcome_of(
    report: Report, answers: Sequence[Answer], root: Path, *, locked: bool = False
) -> RunOutcome:
    """Return what a report concludes.

    Parameters
    ----------
    answers
        To other questions than reconstruction; those that are missing have no ``value``.
    root
        The run directory, for the sizes of uploads.
    """
    variant = Variant(root.name, words=DefenseWords(locked=locked))
    row = variant_row(variant, root, report, ExampleCounts())
    return RunOutcome(
        accuracy=row.client_accuracy if row.accuracy is None else row.accuracy,
        seconds=row.costs.seconds_per_round,
        bytes=row.costs.bytes_per_upload,
        questions=(_reconstruction(report, row.attacks), *_others(report, answers)),
    )


def _reconstruction(report: Report, attacks: Sequence[AttackRow]) -> QuestionOutcome:
    best = max(attacks, key=strength, default=None)
    closest = max((v for a in attacks if (v := a.primary.mean) is not None), default=None)
    level = str(report.verdict.level)
    if level == "none-leaked" and any(
        t.tier == "adaptive" and t.needed and not t.tried for t in report.verdict.tiers
    ):
        level = "adaptive-not-tried"
    return QuestionOutcome(
        question=RECONSTRUCTION,
        value=None if closest is None else min(1.0, max(0.0, closest)),
        level=level,
        leaked=best.leaked if best else 0,
        scored=best.judged if best else 0,
        attack=f"{best.attack_name} ({best.tier})" if best else "",
    )


def _others(report: Report, answers: Sequence[Answer]) -> list[QuestionOutcome]:
    found = []
    for facts in report.questions:
        kind = RULES.get(facts.question)
        mine = [a for a in answers if a.question == facts.question and not a.refused]
        gated = [] if kind is None else [v for a in mine for v in kind.gated(a, kind.gate, None)]
        values = [value for _, value in gated if value is not None]
        found.append(
            QuestionOutcome(
                question=facts.question,
                value=min(1.0, max(0.0, max(values))) if values else None,
                level=facts.level,
                missed=facts.missed,
            )
        )
    return found
