"""Texts as token ids and back, by a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import torch
from torch import Tensor

from bract.config.text import TextSchema
from bract.errors import BractError, contained, one_line

FILE = "tokenizer.json"
UNLABELLED = -100
"""Label of a token that has none, as transformers marks it."""

_MOST_BYTES = 2**26
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, from the text of its ``tokenizer.json``.

    Parameters
    ----------
    content
        JSON, as `tokenizers.Tokenizer.to_str` writes it.
    source
        Where it is from, for errors.
    """

    content: str
    source: str

    @classmethod
    def read(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json`` of a folder; nothing is downloaded."""
        path = folder / FILE
        if not path.is_file():
            raise BractError(
                f"{path}: no such file; set data.text.tokenizer to the folder that holds {FILE}",
                code="file-missing",
            )
        if path.stat().st_size > _MOST_BYTES:
            raise BractError(
                f"{path}: larger than {_MOST_BYTES} bytes, which no tokenizer is",
                code="file-unreadable",
            )
        try:
            found = cls(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise BractError(
                f"{path}: cannot be read ({one_line(error, 200)})", code="file-unreadable"
            ) from error
        if found.vocabulary < 2:
            raise BractError(
                f"{path}: holds {found.vocabulary} tokens, expected 2 or more", code="file-damaged"
            )
        return found

    @cached_property
    def digest(self) -> str:
        """First sixteen hexadecimal digits of the content's SHA-256."""
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()[:16]

    @cached_property
    def _library(self) -> Any:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise BractError(
                "texts need the library tokenizers, which is not installed; "
                "pip install 'bract[text]'",
                code="package-missing",
            ) from error
        try:
            with contained():  # a panic of Rust is no `Exception`
                return Library.from_str(self.content)
        except Exception as error:  # the library raises plain exceptions
            raise BractError(
                f"{self.source}: no tokenizer ({one_line(error, 200)})", code="file-damaged"
            ) from error

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids up to the largest; a tokenizer may leave some of them out."""
        return 1 + max(map(int, self._library.get_vocab().values()), default=-1)

    @property
    def padding(self) -> int:
        """Token id that fills sequences, 0 where the tokenizer names none."""
        found = self._library.token_to_id("[PAD]")
        return 0 if found is None else int(found)

    @property
    def special(self) -> tuple[int, ...]:
        """Ids of the special tokens."""
        ids = (self._library.token_to_id(name) for name in _SPECIAL)
        return tuple(sorted(int(one) for one in ids if one is not None))

    def encode(self, texts: Sequence[str], schema: TextSchema) -> Tensor:
        """Return examples ``(N, length, 1, 1)`` in [0, 1] of texts."""
        library = self._library
        library.enable_truncation(schema.length)
        library.enable_padding(length=schema.length, pad_id=schema.padding)
        ids = torch.tensor([e.ids for e in library.encode_batch(list(texts))], dtype=torch.int64)
        return as_example(ids.view(-1, schema.length), schema)

    def encode_words(
        self, texts: Sequence[Sequence[str]], tags: Sequence[Sequence[int]], schema: TextSchema
    ) -> tuple[Tensor, Tensor]:
        """Return examples ``(N, length, 1, 1)`` of texts in words, and labels of tokens.

        The first token of a word has the word's tag, the others, special tokens and padding
        `UNLABELLED`: int64 ``(N, length)``.
        """
        library = self._library
        library.enable_truncation(schema.length)
        library.enable_padding(length=schema.length, pad_id=schema.padding)
        found = library.encode_batch([list(words) for words in texts], is_pretokenized=True)
        ids = torch.tensor([one.ids for one in found], dtype=torch.int64).view(-1, schema.length)
        labels = torch.full(ids.shape, UNLABELLED)
        for row, one, own in zip(labels, found, tags, strict=True):
            before = None
            for place, word in enumerate(one.word_ids):
                if word is not None and word != before:
                    row[place] = own[word]
                before = word
        return as_example(ids, schema), labels

    def words(self, ids: Sequence[int]) -> list[str]:
        """Return the token of each id."""
        return [self._library.id_to_token(int(i)) or "[UNK]" for i in ids]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._library.decode([int(i) for i in ids]))


def as_example(ids: Tensor, schema: TextSchema) -> Tensor:
    """Return token ids int64 ``(..., length)`` as examples ``(..., length, 1, 1)`` in [0, 1]."""
    return (ids.double() / (schema.vocabulary - 1)).float()[..., None, None]


def ids_of(examples: Tensor, schema: TextSchema) -> Tensor:
    """Return the token ids, int64 ``(..., length)``, of examples ``(..., length, 1, 1)``."""
    values = examples.flatten(-3).double() * (schema.vocabulary - 1)
    return values.round().clamp(0, schema.vocabulary - 1).to(torch.int64)


def content_of(ids: Tensor, schema: TextSchema) -> Tensor:
    """Return the ids of one sequence that are neither padding nor special, in order."""
    dropped = torch.tensor([schema.padding, *schema.special], device=ids.device)
    return ids[~torch.isin(ids, dropped)]


def word_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of the words of public texts; other words are cut into characters.

    The vocabulary depends on the texts alone: special tokens, characters, then words in
    alphabetical order.
    """
    try:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
    except ImportError as error:
        raise BractError(
            "texts need the library tokenizers, which is not installed; pip install 'bract[text]'",
            code="package-missing",
        ) from error
    normal, cut = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = {w for text in texts for w, _ in cut.pre_tokenize_str(normal.normalize_str(text))}
    letters = sorted({c for word in words for c in word} | set(ascii_lowercase + digits))
    names = [*_SPECIAL, *letters, *(f"##{c}" for c in letters)]
    names += sorted(words - set(names))
    vocabulary = {name: i for i, name in enumerate(names)}
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normal, cut
    library.decoder = decoders.WordPiece()
    library.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    return Tokenizer(library.to_str(), "the embedded word tokenizer")
