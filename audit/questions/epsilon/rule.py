"""Decide and tabulate measured bounds on epsilon."""

from __future__ import annotations

from collections.abc import Sequence

from bract.audit.questions.epsilon.words import decision, rows
from bract.audit.questions.rule import Decision, Rule, Value
from bract.schema.epsilon import EpsilonAnswer
from bract.schema.report import QuestionFigure, Table

FIGURES = ("low", "low_gaussian", "estimate", "high")


class EpsilonRule(Rule[EpsilonAnswer]):
    """How much the uploads reveal, at least by canaries and at most by the account."""

    name = "epsilon"
    title = "How much at most"
    unit = "one canary of a client"
    position = 2
    needs = frozenset({"upload", "canaries"})
    answer = EpsilonAnswer
    gates = ("low", "low_gaussian", "high")
    gate = "low"

    @classmethod
    def decide(cls, answers: Sequence[EpsilonAnswer]) -> Decision:
        """Return the largest lower bound, beside the account, and what could have been missed."""
        return decision(answers)

    @classmethod
    def table(cls, answers: Sequence[EpsilonAnswer]) -> Table:
        """Return a row for each client and tier."""
        return rows(answers)

    @classmethod
    def figures(cls, answers: Sequence[EpsilonAnswer]) -> list[QuestionFigure]:
        """Return the bounds of every client, at the last round that they are about."""
        return [
            QuestionFigure(
                name=name,
                tier=answer.tier,
                client=one.client,
                round=one.last_round,
                value=getattr(one, name),
            )
            for answer in answers
            for one in answer.clients
            if one.refused is None
            for name in FIGURES
        ]

    @classmethod
    def gated(cls, answer: EpsilonAnswer, field: str, at: str | None) -> list[Value]:
        """Return one number for each client that took part."""
        del at
        return [
            (f"{one.client} ({answer.tier})", getattr(one, field))
            for one in answer.clients
            if one.refused is None
        ]

    @classmethod
    def alarm(cls, answers: Sequence[EpsilonAnswer]) -> str | None:
        """Return which measured epsilon is above its account."""
        broken = [
            f"{c.client} ({a.tier}): measured at least "
            f"{max(c.low or 0.0, c.low_gaussian or 0.0):.3g}, accounted {c.high:.3g}"
            for a in answers
            for c in a.clients
            if c.alarm
        ]
        if not broken:
            return None
        return (
            f"the measured epsilon is above the account: {'; '.join(broken)}; the noise is not "
            "what is declared: check its sensitivity, its randomness, and where it is added"
        )
