"""A description in the making: what is given, what was inferred so far, and the captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bract.audit.captures import Capture, Captures, with_buffers, with_names
from bract.audit.description.facts import CaptureFacts, read_facts, read_tensors
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.inputs import INPUTS
from bract.schema.description import AppDescription
from bract.schema.description_text import build_description


class Draft:
    """What the steps of `complete` read and write, in order.

    Attributes
    ----------
    given
        As a person wrote it.
    content
        The same with everything that was inferred since; ``guessed`` holds the reasons.
    confirmed, doubts
        As in `Findings`.
    facts
        One for each usable capture, by round and client.
    first
        The capture of the first round with the fewest steps.
    model
        As the clients train it; an identity until it is chosen.
    kept_labels
        Of the images that the first client kept; None where it kept none.
    kept_texts
        Token ids, int64 ``(N, T)``, that clients kept.
    kept_signals
        Inputs and labels, as clients kept them, of each client and round that kept signals.
    normalisation_known
        Whether kept inputs show how they were normalised.
    kept_fewer
        Examples that a client kept in its first round, by client, where it declares more.
    """

    def __init__(self, captures: Captures, description: AppDescription) -> None:
        self.captures = captures
        self.given = description
        self.content: dict[str, Any] = description.model_dump(exclude_none=True)
        self.content.setdefault("guessed", {})
        self.confirmed: list[str] = []
        self.facts, refused = read_facts(captures.root)
        self.doubts: list[str] = [f"set aside: {reason}" for reason in refused]
        self.first = min(self.facts, key=lambda f: (f.capture.round, f.steps or 0))
        self.model: nn.Module = nn.Identity()
        self.kept_texts: list[Tensor] = []
        self.kept_signals: list[dict[str, Tensor]] = []
        self.kept_labels: Tensor | None = None
        self.normalisation_known = False
        self.kept_fewer: dict[str, int] = {}

    def description(self) -> AppDescription:
        """Return the description as it is by now, validated."""
        return build_description(self.content)

    def declaration(self, capture: Capture | None = None) -> ClientDeclaration:
        """Return what a capture's client, by default the first one's, declares by now."""
        found = capture or self.first.capture
        return self.description().declare(found.declaration, found.client, found.round)

    def observation(self, fact: CaptureFacts | None = None) -> Observation:
        """Return a capture, by default the first one, under the model's names."""
        observation = read_tensors(self.captures.root, (fact or self.first).capture)
        observation = with_names(observation, self.content.get("names", {}))
        return with_buffers(observation, self.content.get("buffers", ()))

    def guess(self, section: str, key: str, value: Any, reason: str) -> None:
        """Write an undeclared value, and the reason for it."""
        target = self.content.setdefault(section, {}) if section else self.content
        target[key] = value
        self.content["guessed"][f"{section}.{key}" if section else key] = reason

    def classes_by_layer(self) -> int | None:
        """Return the rows of the last captured matrix, which is the number of classes."""
        matrices = [v for v in self.observation().parameters.values() if v.dim() == 2]
        return int(matrices[-1].shape[0]) if matrices else None

    def channels(self) -> list[int]:
        """Return the channels that an image may have, by the first convolution."""
        first = next((m for m in self.model.modules() if isinstance(m, nn.Conv2d)), None)
        if first is not None:
            return [first.in_channels]
        kernels = [v for v in self.observation().parameters.values() if v.dim() == 4]
        return [int(kernels[0].shape[1])] if kernels else [1, 3]


def check_readable(draft: Draft) -> None:
    """Refuse what is declared by now where its input cannot be audited so."""
    declared = draft.declaration()
    if reason := INPUTS[declared.input].declared(declared).unreadable(declared):
        raise BractError(f"bract.yaml: {reason}", code="declaration-wrong")


INFERRED = "inferred: "
"""How the reason for a value begins that captures, or what clients kept, show to be right."""

SIDES = (32, 28, 64, 224, 8, 16, 48, 96, 128, 256, 24, 12, 14, 20, 40, 56, 80, 112, 160, 192, 299)
"""Sides of square images that are tried, the usual ones first."""


def times(shape: Sequence[int]) -> str:
    """Return a shape as it is written in messages: ``3×32×32``."""
    return "×".join(map(str, shape))
