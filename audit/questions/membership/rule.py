"""Decide and tabulate scores of candidates."""

from __future__ import annotations

from collections.abc import Sequence

from bract.audit.questions.membership.rates import RATES, needed
from bract.audit.questions.membership.words import LOOKED_AT, decision, influence_part, rows
from bract.audit.questions.rule import Decision, Rule, Value
from bract.errors import BractError, shown
from bract.schema.membership import MembershipAnswer, Observer
from bract.schema.report import QuestionFigure, QuestionPart, Table


class MembershipRule(Rule[MembershipAnswer]):
    """Whether the records that a client trained on can be told from others of the same site."""

    name = "membership"
    title = "Who was in it"
    unit = "one record of a client"
    position = 1
    needs = frozenset({"upload", "truth"})
    answer = MembershipAnswer
    gates = ("advantage_low", "auc_low", "model_advantage_low", "model_auc_low")
    gate = "advantage_low"

    @classmethod
    def decide(cls, answers: Sequence[MembershipAnswer]) -> Decision:
        """Return what was found on all clients, and what could have been missed."""
        return decision(answers)

    @classmethod
    def table(cls, answers: Sequence[MembershipAnswer]) -> Table:
        """Return a row for each client, attacker and tier, over rounds."""
        return rows(answers)

    @classmethod
    def parts(cls, answers: Sequence[MembershipAnswer]) -> list[QuestionPart]:
        """Return the section of each client's influence on the final model."""
        return influence_part(answers)

    @classmethod
    def figures(cls, answers: Sequence[MembershipAnswer]) -> list[QuestionFigure]:
        """Return the area under the curve of every attacker, client and round."""
        return [
            QuestionFigure(
                name=_figure(client.observer, score.attacker),
                tier=answer.tier,
                client=client.client,
                round=score.round,
                value=score.auc,
            )
            for answer in answers
            for client in answer.every
            for score in client.scores
            if score.round is not None
        ]

    @classmethod
    def gated(cls, answer: MembershipAnswer, field: str, at: str | None) -> list[Value]:
        """Return one number for each client, over rounds.

        ``advantage_low`` is the lower limit on true less false positives at a rate of false
        positives, ``at`` (``1%`` without one), the highest over attackers; ``auc_low`` is that of
        the area under the curve. Both are of updates and of global models, ``model_advantage_low``
        and ``model_auc_low`` of global models alone.
        """
        rate = parse_rate(at or "1%")
        found: list[Value] = []
        alone = field.startswith("model_")
        field = field.removeprefix("model_")
        for one in answer.models if alone else answer.every:
            where = f"{one.client}, {LOOKED_AT[one.observer]} ({answer.tier})"
            values: list[float | None]
            if one.unfair is not None:
                values = []
            elif field == "auc_low":
                values = [s.auc_low for s in one.scores if s.round is None]
            else:
                values = [
                    r.advantage_low
                    for s in one.scores
                    if s.round is None
                    for r in s.rates
                    if r.rate == rate
                ]
            known = [value for value in values if value is not None]
            found.append((where, max(known) if known else None))
        return found

    @classmethod
    def lacks(cls, field: str, at: str | None) -> str:
        """Return how many held-out records the rate needs."""
        rate = parse_rate(at or "1%")
        if field.removeprefix("model_") != "advantage_low":
            return super().lacks(field, at)
        return (
            f"of clients with too few held-out records ({100 * rate:g} % false positives needs "
            f"{needed(rate)}), or unfair ones"
        )

    @classmethod
    def check_gate(cls, at: str | None) -> None:
        """Refuse a rate that the audit does not report."""
        if at is not None:
            parse_rate(at)


def _figure(observer: Observer, attacker: str) -> str:
    """Return the name of a figure: the attacker's, after who looked if it was not the server."""
    return attacker if observer == "server" else f"{observer}-{attacker}"


def parse_rate(text: str) -> float:
    """Read a rate of false positives, such as ``1%``.

    Raises
    ------
    BractError
        If it is none of `RATES`.
    """
    try:
        value = float(text.removesuffix("%")) / 100.0 if text.endswith("%") else None
    except ValueError:
        value = None
    for rate in RATES:
        if value is not None and abs(rate - value) < 1e-9:
            return rate
    known = ", ".join(f"{100 * rate:g}%" for rate in RATES)
    raise BractError(
        f"rate of false positives {shown(text)}: expected one of {known}", code="config-value"
    )
