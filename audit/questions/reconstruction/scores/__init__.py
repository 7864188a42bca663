"""How close a reconstruction is to its original: one scorer a kind of input."""

from __future__ import annotations

from bract.audit.questions.reconstruction.scores.image import ImageScorer
from bract.errors import BractError
from bract.inputs import Input, References
from bract.inputs.image import Image

SCORERS = {Image: ImageScorer}
"""By input; an input that extends another one is scored as that one is."""


def scorer_of(kind: Input, references: References | None) -> ImageScorer:
    """Return the scorer of an input.

    Parameters
    ----------
    references
        Images to distinguish originals from; None without any.
    """
    for base in type(kind).__mro__:
        if base in SCORERS:
            return SCORERS[base](references)
    known = ", ".join(known.name for known in SCORERS)
    raise BractError(f"reconstructions of the input {kind.name} cannot be scored; known: {known}")
