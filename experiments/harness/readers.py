"""Clients that learn to read words, and what reading is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from bract.seeds import derive_seed
from bract.updates.update import Tensors
from experiments.harness.crnn import Architecture, decode, loaded, loss_of

_AT_ONCE = 256
"""Words that are judged together."""

_MOST_SCORED = 10_000
"""Words that a training or a validation score is taken of: its standard error is below 0.5 %."""


class WordSet(Protocol):
    """Images of words, in memory or on disk."""

    def __len__(self) -> int:
        """Return the number of words."""

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield the images ``(B, 1, height, width)``, float32 in [0, 1], and words of each part.

        ``parts`` holds the words' numbers from 0.
        """


@dataclass(frozen=True)
class Words:
    """Words in memory: images float32 ``(N, 1, height, width)`` in [0, 1] and what they say."""

    images: Tensor
    words: list[str]

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.words)

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield the images and words of each part."""
        for part in parts:
            yield self.images[list(part)], [self.words[i] for i in part]


@dataclass(frozen=True)
class Part:
    """Some of the words of a set."""

    whole: WordSet
    numbers: range

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.numbers)

    def batches(self, parts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield the images and words of each part."""
        return self.whole.batches([[self.numbers[i] for i in part] for part in parts])


@dataclass(frozen=True)
class Training:
    """How a client trains in one round; gradients are clipped at norm 5."""

    batch: int = 800
    epochs: int = 1
    optimizer: Literal["adam", "adadelta"] = "adadelta"
    lr: float = 0.05


class Reader:
    """A client with images of words; the last tenth of them validates.

    Attributes
    ----------
    trained
        Share of training words that its own model read after its last training.
    """

    def __init__(
        self,
        architecture: Architecture,
        words: WordSet,
        training: Training,
        *,
        seed: int,
        device: str = "cpu",
    ) -> None:
        cut = len(words) * 9 // 10
        self.own = Part(words, range(cut))
        self.held_out = Part(words, range(cut, min(len(words), cut + _MOST_SCORED)))
        # Scoring a part of the training words ranks clients as well as scoring all of them.
        self.scored = Part(words, range(min(cut, 2 * len(self.held_out))))
        self.architecture, self.training = architecture, training
        self.seed, self.device = seed, device
        self.trained = 0.0

    def train(
        self, arrays: Tensors, server_round: int, proximal_mu: float
    ) -> tuple[Tensors, int, dict[str, float]]:
        """Train for the configured epochs."""
        del proximal_mu
        model = loaded(self.architecture, arrays, self.device).train()
        made = {"adam": torch.optim.Adam, "adadelta": torch.optim.Adadelta}
        optimizer = made[self.training.optimizer](model.parameters(), lr=self.training.lr)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", server_round))
        for _ in range(self.training.epochs):
            order = torch.randperm(len(self.own), generator=generator)
            parts = [part.tolist() for part in order.split(self.training.batch)]
            for images, words in self.own.batches(parts):
                optimizer.zero_grad()
                loss_of(model(images.to(self.device)), words).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
        local = {name: value.cpu() for name, value in model.state_dict().items()}
        loss, self.trained = self._judged(local, self.scored)
        return local, len(self.own), {"trained_loss": loss, "trained_accuracy": self.trained}

    def score(self, arrays: Tensors) -> tuple[float, float]:
        """Return the CTC loss and the share of words read on the validation words."""
        return self._judged(arrays, self.held_out)

    def _judged(self, arrays: Tensors, words: WordSet) -> tuple[float, float]:
        found = read(self.architecture, arrays, words, self.device)
        return found.loss, found.accuracy


@dataclass(frozen=True)
class Reading:
    """What a network read.

    Attributes
    ----------
    loss
        Mean CTC loss.
    said, words
        What it read, and what is written there.
    """

    loss: float
    said: list[str]
    words: list[str]

    @property
    def accuracy(self) -> float:
        """Share of words without a mistake."""
        right = sum(a == b for a, b in zip(self.said, self.words, strict=True))
        return right / len(self.words)

    @property
    def character_errors(self) -> float:
        """Characters to insert, delete or replace, over the characters that are written."""
        wrong = sum(distance(a, b) for a, b in zip(self.said, self.words, strict=True))
        return wrong / sum(len(word) for word in self.words)


@torch.no_grad()
def read(
    architecture: Architecture, arrays: Tensors, words: WordSet, device: str = "cpu"
) -> Reading:
    """Let a network read a whole set."""
    model = loaded(architecture, arrays, device).eval()
    loss = 0.0
    said: list[str] = []
    written: list[str] = []
    numbers = range(len(words))
    parts = [numbers[i : i + _AT_ONCE] for i in range(0, len(words), _AT_ONCE)]
    for images, part in words.batches(parts):
        found = model(images.to(device))
        loss += float(loss_of(found, part)) * len(part)
        said += decode(found)
        written += part
    return Reading(loss / len(written), said, written)


def distance(one: str, other: str) -> int:
    """Return the least number of characters to insert, delete or replace (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]
