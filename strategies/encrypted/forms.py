"""Answers whose tensors lie in one order: others cannot be summed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bract.protocol.records import Contribution


def of_one_form(
    contributions: Sequence[Contribution], forms: Sequence[Any]
) -> tuple[tuple[Contribution, ...], tuple[Contribution, ...]]:
    """Split answers into those of the most frequent form, and the others.

    No single client decides which order is the right one, however early it answers.

    Parameters
    ----------
    contributions
        The answers, in an order that does not depend on when they came.
    forms
        Names and shapes of the tensors of each, in order.
    """
    usual = max(forms, key=list(forms).count, default=None)
    pairs = list(zip(contributions, forms, strict=True))
    return (
        tuple(c for c, form in pairs if form == usual),
        tuple(c for c, form in pairs if form != usual),
    )
