"""The schema of texts: the vocabulary's size, the length, and the tokenizer's fingerprint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

MOST_TOKENS = 1024
"""Longest sequence of a schema."""

MOST_VOCABULARY = 1 << 20
"""Most token ids; `TextSchema.feature_moments` keeps every one apart in float32."""

_OBJECTIVES: dict[Task, Literal["cross_entropy", "token_cross_entropy", "language_model"]] = {
    "classification": "cross_entropy",
    "token-classification": "token_cross_entropy",
    "language-model": "language_model",
}

_CONFIG = ConfigDict(extra="forbid")

MOST_TAGS = 256
"""Most labels of tokens; a model's outputs are tags times tokens."""

Task = Literal["classification", "token-classification", "language-model"]

TokenId = Annotated[int, Field(ge=0, lt=MOST_VOCABULARY)]


@dataclass(frozen=True, config=_CONFIG)
class TextSchema:
    """What the tokens of a text are, the same at every client.

    A token id v is the value ``v / (vocabulary - 1)`` in [0, 1] of an example ``(length, 1, 1)``;
    the model sees the id.

    Attributes
    ----------
    vocabulary
        Number of token ids; the model's embedding has as many rows.
    length
        Tokens of a sequence: longer texts are cut, shorter ones filled with ``padding``.
    padding
        Token id that fills a sequence.
    special
        Token ids that are in every text and hold none of it, such as start and end.
    task
        ``classification``: a label a text. ``language-model``: the model predicts each next token,
        and its output is the loss of a text. ``token-classification``: a label a token, of which
        there are ``tags``; tokens without one do not count.
    tags
        Number of labels of tokens; 0 for the other tasks.
    tokenizer
        First sixteen hexadecimal digits of the SHA-256 of ``tokenizer.json``, by which an audit
        knows whether its tokenizer is the clients'.
    """

    vocabulary: Annotated[int, Field(ge=2, le=MOST_VOCABULARY)]
    length: Annotated[int, Field(ge=2, le=MOST_TOKENS)]
    padding: TokenId = 0
    special: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()
    task: Task = "classification"
    tags: Annotated[int, Field(ge=0, le=MOST_TAGS)] = 0
    tokenizer: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$|^$")] = ""

    @model_validator(mode="after")
    def _fits(self) -> TextSchema:
        for token in (self.padding, *self.special):
            if token >= self.vocabulary:
                raise ValueError(
                    f"token id {token} is beyond the vocabulary of {self.vocabulary} ids"
                )
        fits = self.tags >= 2 if self.task == "token-classification" else self.tags == 0
        if not fits:
            raise ValueError(
                f"tags is {self.tags} for the task {self.task}; token-classification needs 2 or "
                "more, other tasks have none"
            )
        return self

    @property
    def objective(self) -> Literal["cross_entropy", "token_cross_entropy", "language_model"]:
        """Name of the loss, of `bract.models.losses`."""
        return _OBJECTIVES[self.task]

    @property
    def outputs(self) -> int | None:
        """Outputs of a model for one text; None for a classifier, whose classes decide."""
        known = {"token-classification": self.length * self.tags, "language-model": 1}
        return known.get(self.task)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an example, ``(length, 1, 1)``."""
        return self.length, 1, 1

    def feature_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation by which ``(x - mean) / std`` is a token id."""
        return (0.0,) * self.length, (1.0 / (self.vocabulary - 1),) * self.length
