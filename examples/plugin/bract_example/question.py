"""A question: how large is each update, which a server sees without any attack?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from bract.attacks import Progress
from bract.audit.questions import Batch, Decision, Question
from bract.errors import BractError
from bract.schema import Answer, Number, Public
from bract.updates.update import flatten


class LoudnessAnswer(Answer):
    """The Euclidean norm of one client's update in one round."""

    kind = "loudness"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    question: Public[str] = "loudness"
    norm: Public[Number] = None


class Loudness(Question[LoudnessAnswer]):
    """Measures every update, and names the largest."""

    name = "loudness"
    title = "Size of the updates"
    answer = LoudnessAnswer
    gates = ("norm",)

    def ask(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[LoudnessAnswer]:
        """Yield one answer an observation."""
        for capture in batch.captures:
            about = LoudnessAnswer(
                round=capture.round,
                client=capture.client,
                tier=self.seen.request.tier,
                input=capture.declaration.input,
            )
            try:
                update = self.seen.open(capture).update
            except BractError as error:
                yield about.model_copy(update={"refused": str(error)})
                continue
            yield about.model_copy(update={"norm": float(flatten(update).norm())})

    @classmethod
    def decide(cls, answers: Sequence[LoudnessAnswer]) -> Decision:
        """Return the client whose update was largest."""
        known = [(answer.norm or 0.0, answer.client) for answer in answers]
        if not known:
            return Decision("unknown", "No update could be opened.")
        norm, client = max(known)
        return Decision("measured", f"The largest update, of {client}, has the norm {norm:.3g}.")
