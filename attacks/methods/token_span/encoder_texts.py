"""Texts of a model whose tokens see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.orders import Ordered, assemble, at_places, with_all
from bract.attacks.methods.token_span.pursuit import embeddings
from bract.attacks.methods.token_span.relaxed import relax
from bract.attacks.methods.token_span.sequences import Candidates, Checked
from bract.attacks.methods.token_span.subtraction import subtracted
from bract.attacks.methods.token_span.tags import tags_of_text
from bract.attacks.methods.token_span.text_update import TextUpdate
from bract.models.losses import loss_of
from bract.process import clock

_REST = 0.2
"""Share of the time that a search for several texts leaves for those that others hide."""


@dataclass(frozen=True, kw_only=True)
class EncoderTexts:
    """The search for the texts of an encoder.

    Attributes
    ----------
    count
        Texts of the update.
    classes
        Labels that a text may have.
    ends
        Reading of `clock.now` at which it stops.
    generator
        Of starts.
    relax
        Whether texts are also searched by descent on mixtures of tokens.
    """

    update: TextUpdate
    count: int
    classes: int
    ends: float
    generator: torch.Generator
    relax: bool

    def found(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return texts, int64 ``(T,)`` each, and the labels of the first ones.

        Texts that explain the rows of their own tokens are taken out of the update, with their
        labels, and the others read off what is left, in the time that is kept for that.
        """
        found, labels, update = list[Tensor](), list[Tensor](), self.update
        while True:
            left = self.ends - clock.now()
            several = self.count - len(found) > 1
            stop = after(self.ends - (_REST * max(left, 0.0) if several else 0.0))
            rest, kept = update, list[Tensor]()
            for text in self._ordered(update, self.count - len(found), stop).texts:
                other = self._subtracted(rest, text)
                if other is None:
                    kept.append(text)
                else:
                    rest, label = other
                    found.append(text)
                    labels.append(label)
            if rest is update or len(found) == self.count or clock.now() > self.ends:
                return found + kept, labels
            update = rest

    def _subtracted(self, update: TextUpdate, text: Tensor) -> tuple[TextUpdate, Tensor] | None:
        """Return an update without a text, and the text's label; None if it was not in it."""
        name, schema = update.embedding, update.schema
        if name is None or schema.task == "language-model" or not 0 < len(text) <= schema.length:
            return None
        labels: Iterable[Tensor] = (torch.tensor([own]) for own in range(self.classes))
        if schema.tags:
            labels = [
                tags_of_text(update.model, update.gradients, text, embedding=name, tags=schema.tags)
            ]
        left = subtracted(
            update.model,
            update.gradients,
            text,
            embedding=name,
            weight=1.0 / self.count,
            loss=loss_of(schema.objective),
            labels=labels,
        )
        return None if left is None else (update.without(left[0]), left[1])

    def _ordered(self, update: TextUpdate, count: int, stop: Callable[[], bool]) -> Ordered:
        """Return the texts of an update: separated, then ordered."""
        given, special = update.candidates(), update.special
        known = update.tokens_known
        if not known and given is None:
            return Ordered([], 0)
        tokens = update.tokens if given is None else torch.cat(given.tokens).unique()
        places = update.places if known else {}
        site = update.strongest
        bags = bags_of(
            tokens,
            embeddings(update.model, site, tokens, update.schema.length),
            update.rows(site),
            count=count,
            special=special,
            generator=self.generator,
            places=places,
        )
        if count == 1:
            bags = [replace(bag, tokens=tokens[~torch.isin(tokens, special)]) for bag in bags]
        unordered = Ordered([with_all(special[:0], bag.tokens, special) for bag in bags], 0)
        checked = update.checked()
        if checked is None:
            return unordered
        found = assemble(
            update.model,
            checked,
            at_places(given, tokens, places, update.schema.length),
            bags,
            ends=special[:0] if given is None else _ends(given, special),
            special=special[torch.isin(special, tokens)],
            generator=self.generator,
            stop=stop,
            padding=update.schema.padding,
            places=places,
            relaxed=self._relaxed(update, checked),
            enough=count > 1,
        )
        own = tokens[~torch.isin(tokens, special)]
        there = torch.cat([special[:0], *(one[: update.schema.length] for one in found.texts)])
        lacking = own[~torch.isin(own, there)]
        # The later layers' subspaces may be those of no text, as after a step of Adam, which keeps
        # the signs alone; which tokens are there shows nevertheless.
        return unordered if known and 2 * len(lacking) > len(own) else found

    def _relaxed(
        self, update: TextUpdate, checked: Checked
    ) -> Callable[[Candidates, Mapping[int, int]], Tensor] | None:
        name = update.embedding
        if name is None or not self.relax:
            return None
        return partial(relax, update.model, checked, embedding=name, generator=self.generator)


def _ends(given: Candidates, special: Tensor) -> Tensor:
    """Return the lengths at which a special token may end a sequence, or the longest one."""
    longest = max((i + 1 for i, t in enumerate(given.tokens) if len(t)), default=0)
    ends = [
        i + 1
        for i, tokens in enumerate(given.tokens[:longest])
        if i > 0 and bool(torch.isin(tokens, special).any())
    ]
    return torch.tensor(ends or [longest])


def after(ends: float) -> Callable[[], bool]:
    """Return whether a reading of `clock.now` has gone by, as a function."""
    return lambda: clock.now() > ends
