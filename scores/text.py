"""Score reconstructed texts: tokens, order, rare tokens, exact texts, retrieval."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from bract.config.text import TextSchema
from bract.data.texts import tokenizer_of
from bract.data.tokens import Tokenizer, ids_of
from bract.errors import BractError
from bract.inputs import References, Truth
from bract.inputs.text import TextReference
from bract.schema.audit import CellResult, Scores
from bract.scores.base import ScoredImages, Scorer
from bract.scores.table import RowScorer

RARE = 0.01
"""Share of public texts below which a token counts as rare: a name, or a number."""

DRAWS = 199
"""Random orders of a text's tokens that its own order is held against."""

Ids = tuple[int, ...]


class TextScorer(RowScorer):
    """Scores texts against the originals of updates, as `RowScorer` scores rows.

    Parameters
    ----------
    schema
        Of the texts.
    references
        Texts that no client of the update trained on; None leaves retrieval open.
    """

    def __init__(self, schema: TextSchema, references: References | None) -> None:
        Scorer.__init__(self, references)
        self.texts = schema
        self._largest = -1  # of all token ids that were scored

    def shares(self, rows: Tensor, originals: Tensor) -> Tensor:
        """Return the share of each original's tokens that a text has, float64 ``(N, M)``."""
        found, wanted = (self._contents(part) for part in (rows, originals))
        return torch.tensor(
            [[token_recall(one, other) for other in wanted] for one in found], dtype=torch.float64
        )

    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Pair the texts of the blind pick with the originals, and score the pairs.

        Parameters
        ----------
        recovered
            ``(B,)``; rows ``(B, length * tags)`` where tokens have labels.
        """
        found = super().score(images, truth, recovered=recovered)
        # What is in a text is not looked up by its label.
        return replace(found, labels=[0] * len(found.labels)) if truth.labels.dim() > 1 else found

    def distances(self, rows: Tensor, originals: Tensor) -> Tensor:
        """Return half the share of tokens that lack plus half that out of place, ``(N, M)``."""
        found, wanted = (ids_of(part, self.texts) for part in (rows, originals))
        there = wanted != self.texts.padding
        same = ((found[:, None] == wanted[None]) & there[None]).sum(dim=2)
        placed = same.double() / there.sum(dim=1).clamp_min(1)
        return 1.0 - 0.5 * self.shares(rows, originals) - 0.5 * placed

    def cells(
        self,
        row: Tensor,
        found: float,
        certainty: Tensor | None,
        original: Tensor | None = None,
        label: float | None = None,
    ) -> list[CellResult]:
        """Return the tokens of one text in order, each beside the original's.

        Parameters
        ----------
        row, original
            Examples ``(T, 1, 1)``.
        """
        del found, label, certainty
        (mine,) = self._contents(row[None])
        theirs = () if original is None else self._contents(original[None])[0]
        left = Counter(theirs)
        cells = []
        for i in range(max(len(mine), len(theirs))):
            token = mine[i] if i < len(mine) else None
            right = None if original is None or token is None else left[token] > 0
            if right and token is not None:
                left[token] -= 1
            cells.append(
                CellResult(
                    column=str(i + 1),
                    value=None if token is None else self._word(token),
                    original=self._word(theirs[i]) if i < len(theirs) else None,
                    right=right,
                )
            )
        return cells

    def notes(self) -> list[str]:
        """Return what the scores assume."""
        found = []
        if self.texts.task == "token-classification":
            found.append(
                "Every token has a label: the share of labels is that of tokens whose label was "
                "recovered at the token's place."
            )
        if self._tokenizer is not None:
            return [*found, *self._doubts(self._tokenizer)]
        return [
            *found,
            "No tokenizer of the clients' is named (data.text.tokenizer), so tokens are shown as "
            "numbers.",
        ]

    def _doubts(self, tokenizer: Tokenizer) -> list[str]:
        """Return what speaks against a tokenizer whose fingerprint the clients do not declare."""
        ids = tokenizer.vocabulary
        if self._largest >= ids:
            return [
                f"Texts hold the token id {self._largest}, the tokenizer of data.text.tokenizer "
                f"has {ids} ids: it seems to be another model's, so that the words shown are wrong."
            ]
        if self.texts.tokenizer or ids == self.texts.vocabulary:
            return []
        return [
            f"The tokenizer of data.text.tokenizer has {ids} token ids, the clients' vocabulary "
            f"{self.texts.vocabulary}, and the clients declare no fingerprint: if it is another "
            "model's, the words shown are wrong."
        ]

    def _rows(self, rows: Tensor, originals: Tensor) -> list[Scores]:
        if rows.shape != originals.shape:
            raise BractError(
                f"cannot score texts of {tuple(rows.shape)} against {tuple(originals.shape)}",
                code="data-shape",
            )
        pairs = list(zip(self._contents(rows), self._contents(originals), strict=True))
        self._largest = max(
            [self._largest, *(token for pair in pairs for ids in pair for token in ids)]
        )
        return [self._score(found, wanted) for found, wanted in pairs]

    def _score(self, found: Ids, wanted: Ids) -> Scores:
        rare = tuple(token for token in wanted if token in self._rare or not self._common)
        known = self.references is not None and len(rare) > 0
        return Scores(
            features=token_recall(found, wanted),
            exact=found == wanted,
            precision=token_recall(wanted, found),
            rouge_1=rouge_n(found, wanted, 1),
            rouge_2=rouge_n(found, wanted, 2),
            rouge_l=rouge_l(found, wanted),
            longest_run=longest_run(found, wanted),
            rare=token_recall(found, rare) if known else None,
            order_chance=order_chance(found, wanted),
        )

    def _precision(self, row: Tensor, original: Tensor) -> float | None:
        return float(self.shares(original[None], row[None])[0, 0])

    def _contents(self, examples: Tensor) -> list[Ids]:
        dropped = {self.texts.padding, *self.texts.special}
        rows = ids_of(examples.cpu(), self.texts).tolist()
        return [tuple(token for token in row if token not in dropped) for row in rows]

    def classes(self, labels: Tensor) -> list[int]:
        """Return one class for all: a text is compared with every public one."""
        return [0] * len(labels)

    def _same_target(self, found: float, label: float) -> bool:
        return round(found) == round(label)

    def _target_accuracy(
        self, recovered: Tensor | None, order: Tensor, labels: Tensor
    ) -> float | None:
        if self.texts.task == "token-classification" and recovered is not None:
            return tag_accuracy(recovered[order].cpu(), labels)
        if self.texts.task == "language-model":
            return None
        return super()._target_accuracy(recovered, order, labels)

    @cached_property
    def _common(self) -> frozenset[int]:
        """Tokens in at least one public text of a hundred."""
        if self.references is None:
            return frozenset()
        texts = self._contents(self.references.of_class(0))
        counts = Counter(token for text in texts for token in set(text))
        return frozenset(t for t, count in counts.items() if count >= RARE * len(texts))

    @cached_property
    def _rare(self) -> frozenset[int]:
        return frozenset(range(self.texts.vocabulary)) - self._common

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if not isinstance(self.references, TextReference):
            return None
        try:
            found = tokenizer_of(self.references.data)
        except BractError:
            return None
        return found if self.texts.tokenizer in ("", found.digest) else None

    def _word(self, token: int) -> str:
        return str(token) if self._tokenizer is None else self._tokenizer.words([token])[0]


def tag_accuracy(found: Tensor, labels: Tensor) -> float | None:
    """Return the share of tokens with a label whose label was recovered at their place.

    Parameters
    ----------
    found
        Rows ``(N, length * tags)``; zeros where the attacker takes a token to have no label.
    labels
        int64 ``(N, length)``; below 0 where a token has none.
    """
    rows = found.unflatten(-1, (labels.shape[-1], -1))
    there = labels >= 0
    right = (rows.argmax(dim=-1) == labels) & (rows.sum(dim=-1) > 0.0)
    return float(right[there].double().mean()) if bool(there.any()) else None


def token_recall(found: Ids, wanted: Ids) -> float:
    """Return the share of the wanted tokens that were found, each as often as it was found."""
    if not wanted:
        return 0.0
    return sum((Counter(found) & Counter(wanted)).values()) / len(wanted)


def order_chance(found: Ids, wanted: Ids) -> float:
    """Return how often found tokens in random order fit the wanted order as well, in (0, 1].

    The fit counts neighbouring pairs in common and tokens in their place. It is the p-value of a
    permutation test with `DRAWS` orders, always the same ones.
    """
    shuffled, draws = list(found), random.Random(0)
    own, as_well = _order(found, wanted), 1
    for _ in range(DRAWS):
        draws.shuffle(shuffled)
        as_well += _order(shuffled, wanted) >= own
    return as_well / (DRAWS + 1)


def _order(found: Sequence[int], wanted: Ids) -> int:
    pairs = Counter(pairwise(found)) & Counter(pairwise(wanted))
    return pairs.total() + sum(a == b for a, b in zip(found, wanted, strict=False))


def rouge_n(found: Ids, wanted: Ids, n: int) -> float:
    """Return the F-measure of the n-grams that two texts share (Lin 2004, section 2), beta = 1."""
    ours, theirs = (
        Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in (found, wanted)
    )
    if not ours or not theirs:
        return 0.0
    return 2.0 * (ours & theirs).total() / (ours.total() + theirs.total())


def longest_run(found: Ids, wanted: Ids) -> int:
    """Return the length of the longest run of neighbouring tokens that two texts share."""
    longest, before = 0, [0] * (len(wanted) + 1)
    for token in found:
        now = [0] * (len(wanted) + 1)
        for j, other in enumerate(wanted, start=1):
            if token == other:
                now[j] = before[j - 1] + 1
        longest, before = max(longest, *now), now
    return longest


def rouge_l(found: Ids, wanted: Ids) -> float:
    """Return the F-measure of the longest common subsequence (Lin 2004, section 3.1), beta = 1."""
    if not found or not wanted:
        return 0.0
    lengths = [0] * (len(wanted) + 1)
    for token in found:
        before = 0
        for j, other in enumerate(wanted, start=1):
            above = lengths[j]
            lengths[j] = before + 1 if token == other else max(lengths[j], lengths[j - 1])
            before = above
    return 2.0 * lengths[-1] / (len(found) + len(wanted))
