"""Texts of a model whose tokens see earlier ones alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.methods.token_span.beam_search import likeliest_texts
from bract.attacks.methods.token_span.deflating import deflate
from bract.attacks.methods.token_span.sequences import Candidates, candidates_of, extend, grow
from bract.attacks.methods.token_span.text_update import TextUpdate
from bract.attacks.methods.token_span.tied_rows import NextTokens
from bract.errors import BractError
from bract.models.losses import loss_of

_CANDIDATES, _LABELS = 16, 64
"""Texts that may be taken out of a blurred update next, and labels that are tried with each."""


@dataclass(frozen=True, kw_only=True)
class CausalTexts:
    """The search for the texts of a causal model.

    Attributes
    ----------
    count
        Texts to return at most.
    classes
        Labels that a text may have.
    stop
        Whether the time is over.
    """

    update: TextUpdate
    count: int
    classes: int
    stop: Callable[[], bool]

    def found(self) -> list[Tensor]:
        """Return texts, token by token from the spans of later layers, int64 ``(T,)`` each."""
        update = self.update
        if update.followed and update.output is not None:
            return self._followed(update.output)
        apart = update.distances()
        given = candidates_of(apart, update.tokens, update.span.rank)
        checked = update.checked()
        certain = update.span.clean and (checked is None or all(s.clean for s in checked.spans))
        if checked is not None and not (certain and given is not None):
            return self._blurred()
        if given is None:
            return []
        if checked is None:
            return _apart(given, self.count)
        found = extend(update.model, checked, given, self.stop)
        return found or self._nearest(torch.cat(given.tokens).unique())

    def _blurred(self) -> list[Tensor]:
        """Return the texts of subspaces that noise, pruning or rounding blurs.

        The text that explains most of the update is taken out of it, and the others are read off
        what is left.
        """
        found, others, update = list[Tensor](), list[Tensor](), self.update
        while len(found) < self.count and not self.stop():
            try:
                apart, checked = update.distances(), update.checked()
            except BractError:
                break
            if checked is None:
                break
            others = grow(
                update.model,
                checked,
                apart,
                update.tokens,
                special=update.special,
                count=self.count,
                stop=self.stop,
                candidates=None if self.count == 1 else _CANDIDATES,
            )
            rest = self._deflated(update, others) if self.count > 1 else None
            if rest is None:
                break
            text, update = rest
            found.append(text)
        for text in others:
            if len(found) < self.count and not any(torch.equal(text, one) for one in found):
                found.append(text)
        return found

    def _deflated(
        self, update: TextUpdate, texts: Sequence[Tensor]
    ) -> tuple[Tensor, TextUpdate] | None:
        """Return the text that explains most of an update, and the update without it."""
        name, schema = update.embedding, update.schema
        known = schema.task == "classification" and not update.inverted
        if name is None or not known or self.classes > _LABELS:
            return None
        rest = deflate(
            update.model,
            update.gradients,
            texts,
            embedding=name,
            special=update.special,
            loss=loss_of(schema.objective),
            labels=range(self.classes),
        )
        return None if rest is None else (rest[0], update.without(rest[1]))

    def _followed(self, output: str) -> list[Tensor]:
        """Return the texts of a language model whose output layer shares the embedding."""
        update = self.update
        assert update.embedding is not None
        rows = update.gradients[update.embedding][: update.schema.vocabulary]
        given, length = update.candidates(), update.schema.length
        at = [] if given is None else [i for i, here in enumerate(given.tokens) if len(here)]
        return likeliest_texts(
            update.model,
            output,
            NextTokens(rows),
            update.tied_tokens,
            length=min(max(at) + 2, length) if at else length,  # the last is no input
            special=update.special,
            count=self.count,
            stop=self.stop,
        )

    def _nearest(self, tokens: Tensor) -> list[Tensor]:
        """Return texts of an update with more tokens than a later layer's gradient has rows.

        No input then lies in what the rows span. Those of layers that are wider than an embedding
        still lie nearer to it where they were in the update.
        """
        update = self.update
        shapes = [(site, update.rows(site).shape) for site in update.stages.contextual]
        checked = update.checked([site for site, (rows, width) in shapes if width > rows])
        if checked is None:
            return []
        return grow(
            update.model,
            checked,
            torch.zeros(len(tokens), update.schema.length),
            tokens,
            special=update.special,
            count=self.count,
            stop=self.stop,
        )


def _apart(given: Candidates, count: int) -> list[Tensor]:
    """Return the tokens nearest to the span at each position, one sequence below the other."""
    longest = next((i for i, t in enumerate(given.tokens) if not len(t)), len(given.tokens))
    return [
        torch.stack([tokens[min(row, len(tokens) - 1)] for tokens in given.tokens[:longest]])
        for row in range(count)
        if longest
    ]
