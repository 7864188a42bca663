"""The contract of a question, and the registry of questions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from bract.attacks import Progress
from bract.audit.basis import Basis
from bract.audit.captures import Capture
from bract.audit.judging import Checked
from bract.audit.observations import Observations
from bract.audit.results import Batch, Results
from bract.config.audit import TIERS
from bract.errors import BractError
from bract.registry import Registry, named, unknown
from bract.schema import Answer
from bract.schema.report import QuestionFigure, Table

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


@dataclass(frozen=True)
class Probe:
    """What a moment of a batch tells of the whole.

    Attributes
    ----------
    seconds
        Estimated wall time of one upload.
    trials
        Restarts of uploads that ran together in the moment.
    """

    seconds: float
    trials: int


class Question(ABC, Generic[A]):
    """What an audit asks of the observations of one tier.

    The answers are kept in ``audit/questions/NAME/``, one file an observation, or one for the run.

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
    position
        Place of its section on the page, among the other questions'.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset({"upload"})
    answer: ClassVar[type[Answer]]
    gates: ClassVar[tuple[str, ...]] = ()
    gate: ClassVar[str] = ""
    position: ClassVar[int] = 100

    def __init__(self, seen: Observations, files: Results, basis: Basis) -> None:
        self.seen, self.files, self.basis = seen, files, basis

    def share(self, other: Self) -> None:
        """Take over what another tier's question of the same run made and this would make alike."""
        del other

    @abstractmethod
    def ask(self, batch: Batch, progress: Callable[[Progress], None] | None = None) -> Iterator[A]:
        """Yield the answers of a batch: one an observation, or one for all of them."""

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
    def offered(cls, seen: Observations) -> bool:
        """Whether an audit that names no question asks this one: its material is at hand."""
        del seen
        return False

    @classmethod
    def table(cls, answers: Sequence[A]) -> Table | None:
        """Return the table of the page; None shows the public single values of each answer."""
        del answers
        return None

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

    def holds(self, captures: Sequence[Capture]) -> dict[str, str]:
        """Return what an answer about these captures depends on."""
        return self.basis.of_all(captures)

    def plan(self, device: str, *, resume: bool) -> list[Batch]:
        """Return the work to be done: one batch of all chosen captures, or none.

        Parameters
        ----------
        device
            The kind, ``cpu`` or ``cuda``, that the batches are for.
        resume
            Leave out what has answers that still hold.
        """
        del device
        basis = self.holds(self.seen.chosen)
        known = list(self.answers()) if resume else []
        if known and all(answer.basis == basis for answer in known):
            return []
        return [Batch(self.name, "", 0, tuple(self.seen.chosen))]

    def begin(self, *, resume: bool) -> None:
        """Remove the earlier answers that this audit replaces."""
        del resume
        self.files.clear(self.name)

    def execute(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[A]:
        """Ask; write and yield each answer as soon as it is found."""
        basis = self.holds(batch.captures)
        for found in self.ask(batch, progress):
            answer = found.model_copy(update={"basis": basis})
            self.files.write(self.files.of_answer(answer), answer)
            yield answer

    def answers(self) -> Iterator[A]:
        """Read the answers that were kept; what cannot be read is left out."""
        folder: Path = self.files.folder("", self.name)
        kind: type[Any] = self.answer
        for path in sorted(folder.glob("*.json")):
            try:
                yield kind.parse_text(path.read_bytes(), source=str(path))
            except (OSError, BractError):
                continue

    def accept(self, batch: Batch, returned: Mapping[str, bytes]) -> list[A]:
        """Check the files that a worker made of a batch, and keep them as `execute` does."""
        del batch, returned
        raise BractError(
            f"question {self.name}: cannot be asked by workers; leave --ray out", code="usage"
        )

    def needs_seconds(self, attack: str) -> float:
        """Return the least seconds that an attack on one observation is to have; 0 for any."""
        del attack
        return 0.0

    def probe(self, batch: Batch, seconds: float) -> Probe | None:
        """Estimate what one upload of a batch takes, in so many seconds; None if unknown."""
        del batch, seconds
        return None

    def infeasible(self, batch: Batch, capture: Capture) -> str | None:
        """Return why nothing can be expected of an upload, from its declaration alone; or None."""
        del batch, capture
        return None


QUESTIONS: Registry[type[Question[Any]]] = Registry(
    "question", group="bract.questions", check=partial(named, Question)
)
