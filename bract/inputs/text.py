"""Texts: sequences of token ids ``(length, 1, 1)`` in [0, 1], by a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.config.text import TextSchema
from bract.data.texts import with_schema
from bract.data.tokens import UNLABELLED, as_example, content_of, ids_of
from bract.errors import BractError, shown
from bract.inputs.base import FILLING, INPUTS, References, Truth
from bract.inputs.by_schema import InputBySchema, KeptBySchema, ReferenceBySchema
from bract.schema import ClientDeclaration
from bract.schema.inputs import TextOutline

COUNTED = 512
"""Columns of `Texts.features`."""


@INPUTS.register("text")
@dataclass(frozen=True)
class Texts(TextOutline, InputBySchema[TextSchema]):
    """Token ids of texts, with a label each or none."""

    suffix = ".tokens"
    keys = "vocabulary, length, padding, special, task"

    def examples(self, batch: object) -> tuple[Tensor, Tensor] | None:
        """Return token ids, int64 ``(B, T)``, and labels ``(B,)`` of a batch.

        A mapping holds ``input_ids``, as tokenizers of transformers name them, ``attention_mask``
        where some are padding, which becomes `FILLING`, and ``labels`` or ``label``; without
        labels every label is 0. Labels of tokens are ``(B, T)``, below 0 where a token has none;
        those of a language model, which repeat its tokens, are kept as they are.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return None
        ids = batch["input_ids"].detach().cpu()
        if ids.dim() != 2 or ids.is_floating_point() or not len(ids):
            return None
        ids = ids.long()
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            ids = torch.where(mask.detach().cpu().bool(), ids, FILLING)
        labels = batch.get("labels", batch.get("label"))
        shapes = ((len(ids),), tuple(ids.shape))
        if not isinstance(labels, Tensor) or tuple(labels.shape) not in shapes:
            labels = torch.zeros(len(ids), dtype=torch.int64)
        return ids.contiguous(), labels.detach().cpu().long()

    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Return the texts that a client kept, whose file may come from another party."""
        del declaration
        schema = self.of_schema()
        texts = kept["images"] if "images" in kept else _examples(kept["inputs"], schema)
        if texts.dtype != torch.float32 or texts.dim() != 4 or not len(texts):
            raise BractError(
                f"texts are {texts.dtype} {tuple(texts.shape)}, expected (N, T, 1, 1)",
                code="data-shape",
            )
        if tuple(texts.shape[1:]) != schema.shape:
            raise BractError(
                f"texts have {texts.shape[1]} tokens, the declared schema {schema.length}",
                code="data-shape",
            )
        if not bool(((texts >= 0.0) & (texts <= 1.0)).all()):
            raise BractError(
                f"token ids are outside of 0..{schema.vocabulary - 1}", code="data-value"
            )
        labels = kept["labels"]
        if schema.task == "token-classification":
            return Truth(texts, _tags(labels, len(texts), schema))
        if schema.task == "language-model" and labels.dim() == 2:
            labels = torch.zeros(len(texts))
        if labels.shape != (len(texts),) or not bool(labels.isfinite().all()):
            raise BractError(
                f"labels are {tuple(labels.shape)}, expected {len(texts)} numbers",
                code="data-shape",
            )
        if schema.task == "classification" and labels.is_floating_point():
            raise BractError(
                f"labels are {labels.dtype}, expected classes, int64", code="data-shape"
            )
        return Truth(texts, labels.float() if schema.task == "language-model" else labels.long())

    def features(self, examples: Tensor) -> Tensor:
        """Return how often each token is in a text, ``(N, COUNTED)``; rare ids share a column."""
        ids = ids_of(examples, self.of_schema())
        counts = torch.zeros(len(ids), COUNTED)
        return counts.scatter_add(1, ids % COUNTED, torch.ones(ids.shape))

    def fitted(self, data: DataConfig, declaration: ClientDeclaration) -> DataConfig:
        """Return the section with the declared schema."""
        return with_schema(data, declaration.text)

    def references(self, data: DataConfig, seed: int) -> References:
        """Return texts of the test split."""
        return TextReference(data, seed)

    @staticmethod
    def references_of(
        examples: Tensor, labels: Tensor, seed: int, schema: TextSchema
    ) -> References:
        """Return texts that clients kept."""
        return KeptTexts(examples, labels, seed, schema)

    @staticmethod
    def extent(schema: TextSchema) -> str:
        """Return in words how many tokens a text has."""
        return f"the schema of texts has {schema.length} tokens"

    def save(self, example: Tensor, beside: Path, index: int, role: str) -> str:
        """Write the token ids of a text, without padding and special ones, as JSON."""
        schema = self.of_schema()
        ids = content_of(ids_of(example, schema), schema).tolist()
        return self._write(json.dumps(ids) + "\n", beside, index, role)

    @classmethod
    def check_saved(cls, name: str, content: bytes) -> None:
        """Refuse what is no list of token ids."""
        try:
            found = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BractError(
                f"{name} is no JSON of token ids: {shown(str(error))}", code="file-damaged"
            ) from error
        whole = isinstance(found, list) and all(type(i) is int and i >= 0 for i in found)
        if not whole:
            raise BractError(
                f"{name} is no JSON of token ids: expected a list of whole numbers",
                code="file-damaged",
            )


class TextReference(ReferenceBySchema[TextSchema]):
    """Texts of the test split, all of one class: what is in a text is not by its label."""

    kind = Texts.name
    mean_name, random_name = "frequent_tokens", "random_text"
    one_class = True

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return for each label the text of the most frequent token at each position."""
        return self._usual.expand(len(wanted), -1, -1, -1).clone()

    @cached_property
    def _usual(self) -> Tensor:
        ids = ids_of(self.candidates, self.schema)
        return as_example(ids.mode(dim=0).values, self.schema)


class KeptTexts(TextReference, KeptBySchema[TextSchema]):
    """Texts that clients kept, without those of one client's update."""


def _tags(labels: Tensor, count: int, schema: TextSchema) -> Tensor:
    """Return labels of tokens ``(N, length)``, -100 where a token has none."""
    fits = labels.dim() == 2 and len(labels) == count and labels.shape[1] <= schema.length
    if not fits or labels.is_floating_point():
        raise BractError(
            f"labels are {labels.dtype} {tuple(labels.shape)}, expected int64 of {count} "
            f"texts with at most {schema.length} tokens, one a token",
            code="data-shape",
        )
    if bool((labels >= schema.tags).any()):
        raise BractError(
            f"a label of a token is not below the {schema.tags} declared tags", code="data-value"
        )
    padded = torch.full((count, schema.length), UNLABELLED)
    padded[:, : labels.shape[1]] = torch.where(labels < 0, UNLABELLED, labels.long())
    return padded


def _examples(ids: Tensor, schema: TextSchema) -> Tensor:
    """Return examples of token ids ``(N, T)`` or ``(N, T, 1, 1)`` as the model saw them."""
    flat = ids.flatten(1)
    if not flat.numel():
        raise BractError(f"inputs of shape {tuple(ids.shape)} hold no token", code="data-empty")
    flat = torch.where(flat == FILLING, schema.padding, flat)
    if flat.shape[1] > schema.length:
        raise BractError(
            f"texts of {flat.shape[1]} tokens were trained on, the declared length is "
            f"{schema.length}; declare the length that the tokenizer pads to",
            code="data-shape",
        )
    whole = flat.double().round()
    if bool((flat != whole).any()) or float(whole.min()) < 0 or whole.max() >= schema.vocabulary:
        raise BractError(
            f"inputs are no token ids in 0..{schema.vocabulary - 1}", code="data-value"
        )
    padded = torch.full((len(flat), schema.length), schema.padding)
    padded[:, : flat.shape[1]] = whole.long()
    return as_example(padded, schema)
