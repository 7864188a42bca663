"""Complete a description from the captures and the model, and check that they go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bract.audit.captures import Captures
from bract.audit.description import kept, model, rounds, shapes, size, steps
from bract.audit.description.draft import Draft
from bract.errors import BractError, one_line
from bract.schema.description import AppDescription


@dataclass
class Findings:
    """What was found about a description.

    Attributes
    ----------
    description
        Completed, with the reasons of its guesses.
    confirmed
        What the captures bear out, in words.
    doubts
        What does not fit well and is no error, in words.
    is_confirmed
        Whether every upload that was repeated on what its client kept is as described.
    against
        What shows that the updates are read with the opposite sign, unless the server does not
        follow the mean of a round's updates; None where nothing does.
    """

    description: AppDescription
    confirmed: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    is_confirmed: bool = False
    against: str | None = None


def complete(
    captures: Captures,
    description: AppDescription,
    *,
    truth: Path | None = None,
    counted: Mapping[tuple[str, int], int] | None = None,
) -> Findings:
    """Fill in undeclared values, and check everything against the captures.

    The model is imported and run: `captures` must name it among its trusted models.

    Parameters
    ----------
    truth
        Folder of what clients kept, where they gave it: then the input is no guess.
    counted
        Passes in which witnesses saw batch normalisation count, by client and round.
    """
    draft = Draft(captures, description)
    _check_clients(draft)
    if truth is not None:
        kept.guess_columns(draft, truth)
    model.choose_model(draft)
    if truth is not None:
        kept.read_truth(draft, truth)
    shapes.choose_loss(draft)
    shapes.choose_input(draft)
    steps.choose_norm_mode(draft)
    steps.choose_steps(draft, counted or {})
    size.choose_size(draft)
    against = rounds.check_server_step(draft)
    return Findings(draft.description(), draft.confirmed, draft.doubts, against=against)


def _check_clients(draft: Draft) -> None:
    captured = sorted({c.client for c in draft.captures.index})
    if strange := sorted(set(draft.given.clients) - set(captured)):
        raise BractError(
            f"bract.yaml: clients.{strange[0]}: no capture is of it; captured are "
            f"{one_line(', '.join(captured), 300)}",
            code="unknown-name",
        )
