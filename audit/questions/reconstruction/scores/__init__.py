"""How close a reconstruction is to its original: one scorer a kind of input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from bract.audit.questions.reconstruction.scores.image import ImageScorer, ScoredImages
from bract.audit.questions.reconstruction.scores.table import RowScorer
from bract.audit.questions.reconstruction.scores.text import TextScorer
from bract.errors import BractError
from bract.inputs import Input, References, Truth
from bract.inputs.image import Image
from bract.inputs.table import Table
from bract.inputs.text import Texts
from bract.schema.audit import Baseline, CalibrationBin, CellResult, Retrieval, Scores


class Scorer(Protocol):
    """Scores reconstructions of one input; see `ImageScorer` for what each method returns."""

    references: References | None

    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Match reconstructions to the originals, and score the pairs."""

    def oracle(self, restarts: Sequence[Tensor], scored: ScoredImages) -> list[Scores]:
        """Score the restart that is nearest to the originals."""

    def baselines(
        self, made: Mapping[str, Tensor], scored: ScoredImages, truth: Truth, count: int
    ) -> dict[str, list[Baseline]]:
        """Score baselines as the attack was."""

    def retrieval(
        self, images: Tensor, scored: ScoredImages, truth: Truth
    ) -> list[Retrieval | None]:
        """Bound the chance of each pair."""

    def cells(
        self,
        row: Tensor,
        found: float,
        certainty: Tensor | None,
        original: Tensor | None = None,
        label: float | None = None,
    ) -> list[CellResult]:
        """Return an example as cells of named columns; none of an image."""

    def calibration(self, rows: Sequence[Sequence[CellResult]]) -> list[CalibrationBin]:
        """Compare the attacker's certainty of cells with how often it is right."""

    def notes(self) -> list[str]:
        """Return what is to be known about the scores."""


def _of_rows(kind: Any, references: References | None) -> Scorer:
    return RowScorer(kind.of_schema(), references)


def _of_texts(kind: Any, references: References | None) -> Scorer:
    return TextScorer(kind.of_schema(), references)


SCORERS: dict[type[Input], Callable[[Any, References | None], Scorer]] = {
    Image: lambda _, references: ImageScorer(references),
    Table: _of_rows,
    Texts: _of_texts,
}
"""By input; an input that extends another one is scored as that one is."""


def scorer_of(kind: Input, references: References | None) -> Scorer:
    """Return the scorer of an input.

    Parameters
    ----------
    references
        Examples to distinguish originals from; None without any.
    """
    for base in type(kind).__mro__:
        if base in SCORERS:
            return SCORERS[base](kind, references)
    known = ", ".join(known.name for known in SCORERS)
    raise BractError(
        f"reconstructions of the input {kind.name} cannot be scored; known: {known}",
        code="input-mismatch",
    )
