"""Texts: embedded made-up notes, and columns of CSV and JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from bract.config import DataConfig
from bract.config.sections import TextSection
from bract.config.text import TextSchema
from bract.data.notes import DEPARTMENTS, TAGS, clinical_notes
from bract.data.sources import DATASETS, Dataset, Source, Split
from bract.data.spec import DataSpec
from bract.data.tables import MOST_BYTES, read_table
from bract.data.tokens import Tokenizer, word_tokenizer
from bract.errors import BractError, one_line, shown

Row = TypeVar("Row")

NOTES = 1500
"""Notes of the embedded set; every fifth is test data."""

_PUBLIC_NOTES = 3000
"""Notes of another seed whose words are the embedded tokenizer's."""

Labelled = list[tuple[str, str]]

Tagged = list[tuple[list[str], list[str]]]
"""Texts in words, and the tag of each word."""


@dataclass(frozen=True)
class TextSource(Source):
    """Encoded texts, ``(length, 1, 1)`` each, in [0, 1]."""

    encoded: torch.Tensor | None = None

    def images(self, indices: Sequence[int], *, channels: int, size: int) -> torch.Tensor:
        """Return texts ``(n, length, 1, 1)``."""
        del channels, size
        assert self.encoded is not None
        return self.encoded[torch.as_tensor(list(indices), dtype=torch.int64)]


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Labelled texts; ``read`` returns those of a split, ``read_words`` those with tags."""

    read: Callable[[DataConfig, Split], Labelled] | None = None
    read_words: Callable[[DataConfig, Split], Tagged] | None = None

    def splits_rows(self, config: DataConfig) -> bool:
        """Return whether the texts are a file's, of which every fifth is test data."""
        return config.path is not None and self.read is _file

    def known_spec(self, config: DataConfig) -> DataSpec | None:
        """Return `spec`; None where a tokenizer's folder is read for it."""
        section = section_of(config)
        read = section.tokenizer is not None and section.declared is None
        return None if read else self.spec(config)

    def spec(self, config: DataConfig) -> DataSpec:
        """Return the shape ``(length, 1, 1)`` and the schema."""
        section = section_of(config)
        schema = schema_of(config)
        outputs = schema.outputs or len(_classes(config, section))
        mean, std = schema.feature_moments()
        return DataSpec(schema.shape, outputs, mean, std, text=schema)

    def open_split(self, config: DataConfig, split: Split) -> TextSource:
        """Tokenize one split."""
        assert self.read is not None
        section, schema = section_of(config), schema_of(config)
        if schema.task == "token-classification":
            return self._open_words(config, split, schema)
        rows = self.read(config, split)
        encoded = tokenizer_of(config).encode([text for text, _ in rows], schema)
        if schema.task == "language-model":
            labels, outputs = torch.zeros(len(rows)), 1
        else:
            known = {name: i for i, name in enumerate(_classes(config, section))}
            for at, (_, label) in enumerate(rows):
                if label not in known:
                    raise BractError(
                        f"data.text.classes lacks the label {shown(label)} of text {at + 1} of the "
                        f"{split} split; list every label that any client has",
                        code="data-value",
                    )
            labels = torch.tensor([known[label] for _, label in rows], dtype=torch.int64)
            outputs = len(known)
        return TextSource(
            labels=labels,
            classes=outputs,
            channels=schema.length,
            read=lambda i: encoded[i],
            encoded=encoded,
        )

    def _open_words(self, config: DataConfig, split: Split, schema: TextSchema) -> TextSource:
        assert self.read_words is not None
        rows = self.read_words(config, split)
        known = {name: i for i, name in enumerate(_classes(config, section_of(config)))}
        for at, (_, tags) in enumerate(rows):
            for tag in tags:
                if tag not in known:
                    raise BractError(
                        f"data.text.classes lacks the tag {shown(tag)} of text {at + 1} of the "
                        f"{split} split; list every tag that any client has",
                        code="data-value",
                    )
        encoded, labels = tokenizer_of(config).encode_words(
            [words for words, _ in rows], [[known[tag] for tag in tags] for _, tags in rows], schema
        )
        return TextSource(
            labels=labels,
            classes=schema.length * schema.tags,
            channels=schema.length,
            read=lambda i: encoded[i],
            encoded=encoded,
        )


def _classes(config: DataConfig, section: TextSection) -> tuple[str, ...]:
    if section.classes:
        return section.classes
    if config.name == "clinical-notes":
        return TAGS if section.task == "token-classification" else DEPARTMENTS
    raise BractError(
        f"data.name {config.name!r} needs data.text.classes, the labels in an order that every "
        "client shares",
        code="config-key",
    )


def section_of(config: DataConfig) -> TextSection:
    """Return the section of texts; a `BractError` where the input is another one."""
    if config.input != "text":
        raise BractError(
            f"data.name {config.name!r} holds texts, data.input is {config.input!r}; set "
            "data.input: text",
            code="input-mismatch",
        )
    return config.text or TextSection()


def schema_of(config: DataConfig) -> TextSchema:
    """Return the declared schema, or that of the section's tokenizer."""
    section = section_of(config)
    if section.declared is not None:
        return section.declared
    tokenizer = tokenizer_of(config)
    try:
        return TextSchema(
            vocabulary=tokenizer.vocabulary,
            length=section.length,
            padding=tokenizer.padding,
            special=tokenizer.special,
            task=section.task,
            tags=len(_classes(config, section)) if section.task == "token-classification" else 0,
            tokenizer=tokenizer.digest,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        named = f"{first['loc'][0]}: " if first["loc"] else ""
        raise BractError(
            f"{tokenizer.source}: {named}{one_line(first['msg'], 200)}", code="config-value"
        ) from None


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of the section's folder, or that of the embedded notes' words."""
    section = section_of(config)
    found = _embedded() if section.tokenizer is None else Tokenizer.read(section.tokenizer)
    declared = section.declared
    if declared is not None and declared.tokenizer not in ("", found.digest):
        raise BractError(
            f"{found.source}: its fingerprint is {found.digest}, the clients declare "
            f"{declared.tokenizer}; set data.text.tokenizer to the clients' tokenizer",
            code="config-conflict",
        )
    if declared is not None and found.vocabulary > declared.vocabulary:
        raise BractError(
            f"{found.source}: the tokenizer has {found.vocabulary} token ids, the clients declare "
            f"{declared.vocabulary}; set data.text.tokenizer to the clients' tokenizer",
            code="config-conflict",
        )
    return found


def with_schema(config: DataConfig, schema: TextSchema | None) -> DataConfig:
    """Return the data section that holds texts of a declared schema."""
    section = replace_section(config.text or TextSection(), schema)
    return config.model_copy(update={"input": "text", "text": section})


def replace_section(section: TextSection, schema: TextSchema | None) -> TextSection:
    """Return the section with another declared schema."""
    return section.model_copy(update={"declared": schema})


@lru_cache(maxsize=1)
def _embedded() -> Tokenizer:
    return word_tokenizer([note.text for note in clinical_notes(_PUBLIC_NOTES, seed=1)])


def _split(rows: list[Row], split: Split) -> list[Row]:
    """Return every fifth text as test data, the others to train on."""
    return [row for i, row in enumerate(rows) if (i % 5 == 0) == (split == "test")]


def _notes(config: DataConfig, split: Split) -> Labelled:
    del config
    notes = clinical_notes(NOTES, seed=0)
    return _split([(note.text, DEPARTMENTS[note.department]) for note in notes], split)


def _notes_in_words(config: DataConfig, split: Split) -> Tagged:
    del config
    notes = clinical_notes(NOTES, seed=0)
    return _split([(list(n.words), [TAGS[tag] for tag in n.tags]) for n in notes], split)


def _file(config: DataConfig, split: Split) -> Labelled:
    section = section_of(config)
    labelled = section.task == "classification"
    wanted = (section.column, section.label) if labelled else (section.column,)
    texts, labels = _columns(config, wanted)
    for at, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or not text.strip() or label is None:
            raise BractError(
                f"{config.path}: row {at + 1} has no text or no label; take it out",
                code="data-value",
            )
    return _split([(t, str(label)) for t, label in zip(texts, labels, strict=True)], split)


def _file_in_words(config: DataConfig, split: Split) -> Tagged:
    section = section_of(config)
    texts, labels = _columns(config, (section.column, section.label))
    rows: Tagged = []
    for at, (text, label) in enumerate(zip(texts, labels, strict=True)):
        words, tags = _words(text), _words(label)
        if not words or len(words) != len(tags):
            raise BractError(
                f"{config.path}: row {at + 1} has {len(words)} words in {shown(section.column)} "
                f"and {len(tags)} tags in {shown(section.label)}; give one tag a word, as two "
                "lists of texts without empty ones, or separated by spaces",
                code="data-value",
            )
        rows.append((words, tags))
    return _split(rows, split)


def _words(cell: object) -> list[str]:
    """Return the words of a list, or of a text by its spaces; none of anything else.

    Whole numbers are words too: data sets of tagged texts often number their tags.
    """
    if isinstance(cell, str):
        return cell.split()
    if not isinstance(cell, list):
        return []
    words = [str(one) if type(one) is int else one for one in cell]
    return words if all(isinstance(one, str) and one for one in words) else []


def _columns(config: DataConfig, wanted: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """Return the column of texts, and that of labels; empty labels where only one is wanted."""
    if config.path is None:
        raise BractError(
            "data.name 'text' needs data.path: a file of .csv, .parquet or .jsonl",
            code="config-key",
        )
    if config.path.suffix.lower() == ".jsonl":
        table = _json_lines(config)
    else:
        table = read_table(config.path)
    for name in wanted:
        if name not in table:
            raise BractError(
                f"{config.path}: has no column {shown(name)}; found "
                f"{', '.join(map(shown, list(table)[:20]))}; set data.text.column and "
                "data.text.label",
                code="data-column",
            )
    texts = table[wanted[0]]
    return texts, table[wanted[1]] if len(wanted) > 1 else [""] * len(texts)


def _json_lines(config: DataConfig) -> dict[str, list[Any]]:
    path = config.path
    assert path is not None
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise BractError(
            f"{path}: no such file, or larger than {MOST_BYTES} bytes", code="file-missing"
        )
    rows: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read ({one_line(error, 200)}); write it as UTF-8",
            code="file-unreadable",
        ) from error
    # Texts may hold characters that `str.splitlines` takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BractError(
                f"{path}: line {number} is no JSON ({one_line(error, 100)})", code="file-damaged"
            ) from error
        if not isinstance(row, dict):
            raise BractError(f"{path}: line {number} is no JSON object", code="file-damaged")
        rows.append(row)
    if not rows:
        raise BractError(f"{path}: holds no rows", code="data-empty")
    return {name: [row.get(name) for row in rows] for name in rows[0]}


def _register(
    name: str,
    read: Callable[[DataConfig, Split], Labelled],
    read_words: Callable[[DataConfig, Split], Tagged],
) -> None:
    dataset: TextDataset

    def open_split(config: DataConfig, split: Split) -> Source:
        return dataset.open_split(config, split)

    dataset = TextDataset(open_split, 1, None, (), (), read=read, read_words=read_words)
    DATASETS.register(name)(dataset)


_register("clinical-notes", _notes, _notes_in_words)
_register("text", _file, _file_in_words)
