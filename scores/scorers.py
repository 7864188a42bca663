"""How close a reconstruction is to its original: one scorer a kind of input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bract.errors import BractError
from bract.inputs import Input, References
from bract.inputs.image import Image
from bract.inputs.signal import Signal
from bract.inputs.table import Table
from bract.inputs.text import Texts
from bract.scores.base import Scorer
from bract.scores.image import ImageScorer
from bract.scores.signal import SignalScorer
from bract.scores.table import RowScorer
from bract.scores.text import TextScorer

__all__ = ["SCORERS", "Scorer", "scorer_of"]


def _of_rows(kind: Any, references: References | None) -> Scorer:
    return RowScorer(kind.of_schema(), references)


def _of_texts(kind: Any, references: References | None) -> Scorer:
    return TextScorer(kind.of_schema(), references)


SCORERS: dict[type[Input], Callable[[Any, References | None], Scorer]] = {
    Image: lambda _, references: ImageScorer(references),
    Table: _of_rows,
    Texts: _of_texts,
    Signal: lambda _, references: SignalScorer(references),
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
