"""The contract of a question, and the registry of questions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from bract.attacks import Progress
from bract.audit.basis import Basis
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.rule import A, Rule
from bract.audit.results import Batch, Results
from bract.errors import BractError
from bract.registry import Registry, named


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


class Question(Rule[A]):
    """Ask one thing of the observations of one tier; its `Rule` decides by the answers.

    The answers are kept in ``audit/questions/NAME/``, one file an observation, or one for the run.
    bract's own questions have their rules in modules of their own, which pages import alone.
    """

    def __init__(self, seen: Observations, files: Results, basis: Basis) -> None:
        self.seen, self.files, self.basis = seen, files, basis

    def share(self, other: Self) -> None:
        """Take over what another tier's question of the same run made and this would make alike."""
        del other

    @abstractmethod
    def ask(self, batch: Batch, progress: Callable[[Progress], None] | None = None) -> Iterator[A]:
        """Yield the answers of a batch: one an observation, or one for all of them."""

    @classmethod
    def offered(cls, seen: Observations) -> bool:
        """Return whether an audit that names no question asks this one: its material is at hand."""
        del seen
        return False

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
    "question",
    group="bract.questions",
    check=partial(named, Question),
    modules=[
        f"bract.audit.questions.{name}.question"
        for name in ("reconstruction", "membership", "epsilon")
    ],
)
