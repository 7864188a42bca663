"""The rule of a question: what is made of its answers, without what finds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from bract.config.audit import TIERS
from bract.errors import BractError
from bract.registry import unknown
from bract.schema import Answer
from bract.schema.report import QuestionFigure, QuestionPart, Table
from bract.scores.judging import Checked

Need = Literal["upload", "truth", "public data", "canaries"]
"""What a question cannot be asked without."""

A = TypeVar("A", bound=Answer)


Value = tuple[str, float | None]
"""Where a number that a gate compares is from, in words, and the number; None if there is none."""


@dataclass(frozen=True)
class Held:
    """The values of one answer that a gate compares.

    Attributes
    ----------
    values
        Numbers with where each is from; None for one that could not be judged.
    noun, without
        What has a number, and what those are that lack it.
    unscored
        Answers that could not be scored, as the client kept no truth.
    counted
        Lines on what counts, where their number is compared rather than each value.
    none
        The line in their place where there is none.
    """

    values: list[Value]
    noun: str = "value"
    without: str = "that were not measured"
    unscored: int = 0
    counted: list[str] | None = None
    none: str = ""


@dataclass(frozen=True)
class Decision:
    """What a question's rule makes of all answers.

    Attributes
    ----------
    level
        One word, by the question's own rule.
    sentence
        What was found, in plain words: the page and the summary for data protection print it.
    effort
        What an attacker needs for it: time, knowledge, equipment; empty prints nothing.
    missed
        How much the question could have missed; empty prints nothing.
    found
        Whether it shows a leak, which stands whatever the uploads are.
    """

    level: str
    sentence: str
    effort: str = ""
    missed: str = ""
    found: bool = False


class Rule(ABC, Generic[A]):
    """Decide by the answers to a question, show them on a page, compare them with a gate.

    Attributes
    ----------
    name
        The name in ``audit.questions``.
    title
        Heading of its section on the page.
    needs
        What it cannot be asked without; the audit refuses it where the run lacks it.
    answer
        Record of one answer.
    gates
        Number fields of an answer that ``--fail-on NAME.FIELD>VALUE`` compares.
    gate
        The one of them that ``--fail-on NAME>VALUE`` compares; empty where none is.
    unit
        What one of its results is of, such as one record; empty where it has none.
    position
        Place of its section on the page, among the other questions'.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset({"upload"})
    answer: ClassVar[type[Answer]]
    gates: ClassVar[tuple[str, ...]] = ()
    gate: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    position: ClassVar[int] = 100

    @classmethod
    @abstractmethod
    def decide(cls, answers: Sequence[A]) -> Decision:
        """Apply the question's one rule to all answers of a run."""

    @classmethod
    def conclude(cls, answers: Sequence[A], checked: Checked) -> Decision:
        """Decide; where an upload is not what its description says, only a leak stands."""
        decision = cls.decide(answers)
        if decision.found or not answers or checked.level is None:
            return decision
        return Decision(checked.level, f"{checked.sentence()} {checked.reason}", decision.effort)

    @classmethod
    def table(cls, answers: Sequence[A]) -> Table | None:
        """Return the table of the page; None shows the public single values of each answer."""
        del answers
        return None

    @classmethod
    def parts(cls, answers: Sequence[A]) -> list[QuestionPart]:
        """Return further sections of the page, each with a table."""
        del answers
        return []

    @classmethod
    def figures(cls, answers: Sequence[A]) -> list[QuestionFigure]:
        """Return numbers by client and round, for TensorBoard and MLflow."""
        del answers
        return []

    @classmethod
    def check_gate(cls, at: str | None) -> None:
        """Refuse what follows ``@`` in ``--fail-on NAME>VALUE@AT``, if it is no tier."""
        if at is not None:
            raise BractError(unknown("tier", at, TIERS), code="unknown-name")

    @classmethod
    def gated(cls, answer: A, field: str, at: str | None) -> list[Value]:
        """Return the numbers of an answer that a gate compares.

        Parameters
        ----------
        field
            One of ``gates``.
        at
            What `check_gate` let pass.
        """
        del at
        return [(answer.where, getattr(answer, field))]

    @classmethod
    def held(
        cls, answers: Sequence[A], field: str, *, tier: str | None, at: str | None, rule: Any
    ) -> Held:
        """Return what a gate compares of the answers of one tier, or of all.

        Parameters
        ----------
        field
            One of ``gates``; empty takes ``gate``.
        rule
            The rule of the run's configuration, for a question that has one.
        """
        del rule
        field = field or cls.gate
        each = [
            cls.gated(a, field, at) for a in answers if not a.refused and tier in (None, a.tier)
        ]
        return Held([value for values in each for value in values], without=cls.lacks(field, at))

    @classmethod
    def in_a_line(cls, answer: A) -> str:
        """Return one answer in a line, for a terminal."""
        found = answer.refused or cls.conclude([answer], Checked.of([answer])).sentence
        where = "the run" if answer.round is None else f"round {answer.round}, {answer.client}"
        return f"{cls.name} on {where}: {found}"

    @classmethod
    def lacks(cls, field: str, at: str | None) -> str:
        """Return what values lack that have no number for a gate."""
        del field, at
        return "that were not measured"

    @classmethod
    def alarm(cls, answers: Sequence[A]) -> str | None:
        """Return why a promised protection does not hold; None where nothing shows that."""
        del answers
        return None
