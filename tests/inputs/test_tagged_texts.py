"""Texts whose tokens have labels, from files, batches and what clients kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.config import DataConfig
from bract.config.sections import TextSection
from bract.data.notes import TAGS, clinical_notes
from bract.data.partition import partition_indices
from bract.data.sources import open_source
from bract.data.texts import schema_of, tokenizer_of
from bract.data.tokens import UNLABELLED, ids_of
from bract.data.views import data_spec
from bract.errors import BractError
from bract.inputs import kept_examples
from bract.inputs.base import joined
from bract.inputs.text import Texts
from bract.models.third_party_texts import task_of
from bract.schema import ClientDeclaration

pytest.importorskip("tokenizers")

NOTES = DataConfig(
    name="clinical-notes", input="text", text=TextSection(length=24, task="token-classification")
)


def words_of(data: DataConfig, split: Any = "test") -> list[tuple[str, int]]:
    """The tokens of the first text with their labels."""
    source, schema = open_source(data, split), schema_of(data)
    ids = ids_of(source.images([0], channels=0, size=0), schema)[0].tolist()
    return list(zip(tokenizer_of(data).words(ids), source.labels[0].tolist(), strict=True))


def test_names_places_dates_and_numbers_of_a_note_have_tags() -> None:
    note = next(n for n in clinical_notes(50, seed=3) if " born " in n.text)
    tagged = list(zip(note.words, (TAGS[tag] for tag in note.tags), strict=True))
    assert "".join(note.words) == note.text.replace(" ", "")
    assert tagged[0][1] == "name"
    year = note.words.index("born") + 1
    assert tagged[year][1] == "date" and note.words[year].isdigit()
    assert tagged[note.words.index("mg") - 1][1] == "number"
    assert ("takes", "other") in tagged and "place" in dict(tagged).values()


def test_tokens_of_the_embedded_notes_have_labels() -> None:
    spec = data_spec(NOTES)
    assert spec.classes == 24 * len(TAGS) and spec.loss == "token_cross_entropy"
    labels = open_source(NOTES, "test").labels
    assert labels.shape == (300, 24) and set(labels.unique().tolist()) == {UNLABELLED, *range(5)}
    assert words_of(NOTES)[0] == ("[CLS]", UNLABELLED)


def write(path: Path, words: Any, tags: Any) -> DataConfig:
    if path.suffix == ".jsonl":
        path.write_text(json.dumps({"words": words, "tags": tags}) + "\n")
    else:
        path.write_text(f"words,tags\n{words},{tags}\n")
    section = TextSection(
        length=16, task="token-classification", column="words", label="tags", classes=("no", "who")
    )
    return DataConfig(name="text", input="text", path=path, text=section)


@pytest.mark.parametrize("name", ["words.jsonl", "words.csv"])
def test_a_file_has_one_tag_a_word_at_its_first_token(tmp_path: Path, name: str) -> None:
    words, tags = ["zyzzy", "takes", "aspirin"], ["who", "no", "no"]
    lists = name.endswith("jsonl")
    data = write(
        tmp_path / name, words if lists else " ".join(words), tags if lists else " ".join(tags)
    )
    found = words_of(data)
    starts = [(token, label) for token, label in found if label >= 0]
    assert [label for _, label in starts] == [1, 0, 0] and starts[0][0] == "z"
    assert all(label == UNLABELLED for token, label in found if token.startswith("##"))


@pytest.mark.parametrize(
    ("words", "tags", "named"),
    [
        (["a", "note"], ["no"], ("data-value", "1", "2", "words", "tags")),
        (["a"], ["other"], ("data-value", "other", "1")),
        (7, ["no"], ("data-value", "1", "0")),
        (["a", ""], ["no", "no"], ("data-value", "1", "0")),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, words: Any, tags: Any, named: tuple[str, ...]
) -> None:
    with refused(*named):
        words_of(write(tmp_path / "words.jsonl", words, tags))


def test_tags_may_be_numbers_and_words_hold_any_character(tmp_path: Path) -> None:
    data = write(tmp_path / "words.jsonl", [], [])
    section = data.text.model_copy(update={"classes": ("0", "1")}) if data.text else None
    line = json.dumps({"words": ["a", "b\u2028c"], "tags": [1, 0]}, ensure_ascii=False)
    (tmp_path / "words.jsonl").write_text(f"\ufeff{line}\n\n", encoding="utf-8")
    found = words_of(data.model_copy(update={"text": section}))
    assert [label for _, label in found if label >= 0] == [1, 0]


def test_a_file_that_is_no_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    data = write(tmp_path / "words.jsonl", [], [])
    (tmp_path / "words.jsonl").write_bytes(b'{"words": ["\xe9"], "tags": ["no"]}')
    with refused("file-unreadable", "words.jsonl", "UTF-8"):
        words_of(data)


@pytest.mark.parametrize(
    ("classes", "named"),
    [
        (["no"], "classes are 1; .* takes 2 to 256"),
        ([str(i) for i in range(257)], "classes are 257"),
        (["no", "who", "no"], "'no' more than once"),
    ],
)
def test_tags_that_no_model_can_have_are_refused(classes: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TextSection.model_validate({"task": "token-classification", "classes": classes})


def test_a_tokenizer_may_leave_ids_out(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    def saved(vocabulary: dict[str, int]) -> DataConfig:
        library = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        library.save(str(tmp_path / "tokenizer.json"))
        return DataConfig(name="clinical-notes", input="text", text=TextSection(tokenizer=tmp_path))

    schema = schema_of(saved({"[UNK]": 1, "[PAD]": 50, "ada": 100}))
    assert (schema.vocabulary, schema.padding) == (101, 50)
    for vocabulary, named in (
        ({}, "holds 0 tokens"),
        ({"[UNK]": 1 << 20}, "vocabulary: .*1048576"),
    ):
        with pytest.raises(BractError, match=f"tokenizer.json: {named}"):
            schema_of(saved(vocabulary))


def test_a_split_by_label_is_refused() -> None:
    with pytest.raises(ValueError, match="set iid or sizes"):
        DataConfig.model_validate(
            NOTES.model_dump() | {"partition": {"kind": "dirichlet", "alpha": 1.0}}
        )
    labels = open_source(NOTES, "train").labels
    split = DataConfig.model_validate({"partition": {"kind": "shards"}}).partition
    with refused("config-conflict"):
        partition_indices(labels, split, clients=2, client=0, seed=0)


def test_labels_of_batches_of_two_widths_are_kept_and_read_as_truth() -> None:
    schema = schema_of(NOTES)
    declared = ClientDeclaration(input="text", text=schema)
    batches = [
        {"input_ids": torch.full((1, n), 7), "labels": torch.arange(n)[None] % 5} for n in (3, 5)
    ]
    found = [kept_examples(batch) for batch in batches]
    parts = [one for one in found if one is not None]
    kept = {n: joined([p[i] for p in parts]) for i, n in enumerate(("inputs", "labels"))}
    truth = Texts.declared(declared).read(kept, declared)
    assert truth.labels.shape == (2, 24)
    assert truth.labels[0, :4].tolist() == [0, 1, 2, UNLABELLED]
    assert truth.labels[1, :6].tolist() == [0, 1, 2, 3, 4, UNLABELLED]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        (torch.zeros(1, dtype=torch.int64), ("data-shape",)),
        (torch.full((1, 3), 5), ("data-value", "5")),
        (torch.zeros(1, 99, dtype=torch.int64), ("data-shape", "24")),
    ],
)
def test_wrong_labels_of_tokens_are_refused(labels: torch.Tensor, named: tuple[str, ...]) -> None:
    declared = ClientDeclaration(input="text", text=schema_of(NOTES))
    with refused(*named):
        Texts.declared(declared).read({"inputs": torch.full((1, 3), 7), "labels": labels}, declared)


def test_a_model_that_labels_tokens_is_recognised_by_what_it_returns() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3))
    assert task_of(model, vocabulary=50, padding=0) == ("token-classification", 3)
