import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.config import DataConfig
from bract.config.sections import TextSection
from bract.config.text import TextSchema
from bract.data.texts import schema_of
from bract.data.tokens import as_example, content_of, ids_of
from bract.data.views import data_spec
from bract.inputs import INPUTS, Truth, kept_examples
from bract.inputs.base import FILLING, content_bytes, joined
from bract.inputs.text import TextReference, Texts
from bract.models import create_model
from bract.schema import ClientDeclaration
from bract.scores import scorer_of
from bract.scores.text import (
    TextScorer,
    longest_run,
    rouge_l,
    rouge_n,
    token_recall,
)

pytest.importorskip("tokenizers")

NOTES = DataConfig(name="clinical-notes", input="text", text=TextSection(length=24))
SCHEMA = schema_of(NOTES)
DECLARED = ClientDeclaration(input="text", text=SCHEMA)


def test_the_embedded_notes_become_tokens_and_labels() -> None:
    source = TextReference(NOTES, 0)
    assert source.candidates.shape[1:] == (24, 1, 1)
    spec = data_spec(NOTES)
    assert spec.classes == 5 and spec.text == SCHEMA and spec.loss == "cross_entropy"
    ids = ids_of(spec.normalise(source.candidates) / (SCHEMA.vocabulary - 1), SCHEMA)
    assert torch.equal(ids, ids_of(source.candidates, SCHEMA))
    assert len(content_of(ids[0], SCHEMA)) > 3


def write(folder: Path, rows: list[dict[str, Any]]) -> DataConfig:
    path = folder / "notes.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    section = TextSection(length=8, classes=("well", "ill"))
    return DataConfig(name="text", input="text", path=path, text=section)


def test_a_file_of_json_lines_is_read(tmp_path: Path) -> None:
    config = write(tmp_path, [{"text": f"a note {i}", "label": "ill"} for i in range(10)])
    reference = TextReference(config, 0)
    assert len(reference.candidates) == 2


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "a note", "label": "other"}, ("data-value", "other", "1")),
        ({"note": "a note", "label": "ill"}, ("data-column", "text")),
        ({"text": "", "label": "ill"}, ("data-value", "1")),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, row: dict[str, Any], named: tuple[str, ...]
) -> None:
    with refused(*named):
        _ = TextReference(write(tmp_path, [row]), 0).candidates


def test_another_tokenizer_is_refused() -> None:
    from dataclasses import replace

    data = Texts.declared(DECLARED).fitted(
        NOTES, ClientDeclaration(input="text", text=replace(SCHEMA, tokenizer="0" * 16))
    )
    with refused("config-conflict"):
        _ = TextReference(data, 0).candidates


def test_a_tokenizer_with_more_ids_than_clients_declare_is_refused() -> None:
    from dataclasses import replace

    few = replace(SCHEMA, tokenizer="", vocabulary=SCHEMA.vocabulary - 1)
    data = Texts.declared(DECLARED).fitted(NOTES, ClientDeclaration(input="text", text=few))
    with refused("config-conflict", SCHEMA.vocabulary):
        _ = TextReference(data, 0).candidates


def test_the_page_doubts_a_tokenizer_that_may_be_another_model_s() -> None:
    from dataclasses import replace

    more = replace(SCHEMA, vocabulary=SCHEMA.vocabulary + 9)

    def notes(schema: TextSchema, token: int) -> str:
        declared = ClientDeclaration(input="text", text=schema)
        data = Texts.declared(declared).fitted(NOTES, declared)
        scorer = TextScorer(schema, TextReference(data, 0))
        text = as_example(torch.full((1, schema.length), token), schema)
        scorer.score(text, Truth(text, torch.zeros(1, dtype=torch.int64)))
        return " ".join(scorer.notes())

    assert notes(SCHEMA, 7) == ""
    assert notes(more, 7) == ""  # the clients' fingerprint is this tokenizer's
    undeclared = replace(more, tokenizer="")
    assert f"vocabulary {more.vocabulary}, and the clients declare no" in notes(undeclared, 7)
    beyond = SCHEMA.vocabulary + 3
    for schema in (more, undeclared):
        assert f"hold the token id {beyond}" in notes(schema, beyond)


def test_batches_of_token_ids_are_recognised_by_name() -> None:
    batch = {"input_ids": torch.randint(9, (3, 5)), "labels": torch.tensor([0, 1, 0])}
    found = kept_examples(batch)
    assert found is not None and torch.equal(found[0], batch["input_ids"])
    assert found[0].dtype == torch.int64 and torch.equal(found[1], batch["labels"])


def test_padding_is_marked_where_a_mask_says_so_and_is_no_part_of_a_text() -> None:
    ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = kept_examples({"input_ids": ids, "attention_mask": mask})
    assert found is not None and found[0].tolist() == [[5, 6, FILLING], [7, 8, 9]]
    wide = joined([found[0], torch.tensor([[5, 6, 7, 8, 9]])])
    assert wide.tolist()[0] == [5, 6, FILLING, FILLING, FILLING]
    # The same text in batches of two widths is one text.
    assert content_bytes(wide[0]) == content_bytes(found[0][0]) != content_bytes(wide[1])
    truth = Texts.declared(DECLARED).read(
        {"inputs": wide, "labels": torch.zeros(3, dtype=torch.int64)}, DECLARED
    )
    assert ids_of(truth.images, SCHEMA)[0, 2:].unique().tolist() == [SCHEMA.padding]


def test_token_ids_that_a_client_kept_become_examples_again() -> None:
    ids = torch.randint(4, SCHEMA.vocabulary, (2, 20))
    truth = (
        INPUTS["text"]
        .declared(DECLARED)
        .read({"inputs": ids.float(), "labels": torch.tensor([0, 1])}, DECLARED)
    )
    assert torch.equal(ids_of(truth.images, SCHEMA)[:, :20], ids)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        (torch.full((1, 20), 1e7), ("data-value",)),
        (torch.full((1, 20), 0.5), ("data-value",)),
        (torch.ones(1, 99), ("data-shape",)),
    ],
)
def test_a_truth_that_holds_no_texts_is_refused(
    inputs: torch.Tensor, named: tuple[str, ...]
) -> None:
    with refused(*named):
        Texts.declared(DECLARED).read({"inputs": inputs, "labels": torch.tensor([0])}, DECLARED)


def test_a_saved_text_is_a_list_of_token_ids(tmp_path: Path) -> None:
    example = as_example(torch.tensor([5, 6, 7] + [0] * 21), SCHEMA)
    name = Texts(SCHEMA).save(example, tmp_path / "a.json", 0, "original")
    content = (tmp_path / name).read_bytes()
    Texts.check_saved(name, content)
    assert json.loads(content) == [5, 6, 7]
    for wrong in (b"{}", b"[1.5]", b"[-1]", b"\xff"):
        with refused("file-damaged"):
            Texts.check_saved(name, wrong)


def test_scores_count_tokens_order_and_rare_ones() -> None:
    assert token_recall((1, 2, 2), (2, 2, 3, 4)) == 0.5
    # The longest common subsequence of ABCD and ACBD has three tokens.
    assert rouge_l((1, 2, 3, 4), (1, 3, 2, 4)) == pytest.approx(0.75)
    # Lin 2004, section 3.1: "police killed the gunman" against "police kill the gunman" and "the
    # gunman kill police"; by hand, bigrams 1 of 3 and 1 of 3, unigrams 3 of 4 each.
    police, killed, the, gunman, kill = range(5)
    assert rouge_n((police, kill, the, gunman), (police, killed, the, gunman), 1) == 0.75
    assert rouge_n((police, kill, the, gunman), (police, killed, the, gunman), 2) == pytest.approx(
        1 / 3
    )
    assert rouge_n((the, gunman, kill, police), (police, killed, the, gunman), 1) == 0.75
    assert rouge_l((the, gunman, kill, police), (police, killed, the, gunman)) == 0.5
    # A token counts as often as the other text has it.
    assert rouge_n((the, the, the), (the, gunman), 1) == pytest.approx(2 / 5)
    assert rouge_n((the,), (the,), 2) == 0.0
    assert longest_run((9, 1, 2, 3, 7), (1, 2, 3, 9)) == 3 and longest_run((), (1,)) == 0
    scorer = scorer_of(Texts(SCHEMA), TextReference(NOTES, 0))
    reference = TextReference(NOTES, 0)
    from bract.inputs import Truth

    truth = Truth(reference.candidates[:3], torch.tensor([0, 1, 2]))
    scored = scorer.score(truth.images.flip(0), truth, recovered=torch.tensor([2, 1, 0]))
    assert [row.features for row in scored.rows] == [1.0] * 3
    assert all(row.exact and row.rouge_l == 1.0 for row in scored.rows)
    assert scored.label_accuracy == 1.0
    cells = scorer.cells(truth.images[0], 0.0, None, truth.images[1])
    assert cells[0].value and any(cell.right is False for cell in cells)


def packaged_encoder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save a tiny encoder in the place of the package's, and return it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=SCHEMA.vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=SCHEMA.length,
    )
    packaged = transformers.BertModel(config)
    packaged.save_pretrained(folder)
    monkeypatch.setattr("bract.models.language.minilm_folder", lambda: folder)
    return packaged


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"vocabulary": SCHEMA.vocabulary + 1}, ("model-mismatch",)),
        ({"length": SCHEMA.length + 1}, ("model-mismatch",)),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], named: tuple[str, ...]
) -> None:
    from dataclasses import replace

    packaged_encoder(tmp_path, monkeypatch)
    with refused(*named):
        create_model(
            "text-encoder(weights=minilm)",
            classes=3,
            channels=24,
            image_size=1,
            text=replace(SCHEMA, **wrong),
        )


def test_weights_of_a_package_are_loaded_and_an_outline_of_them_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = packaged_encoder(tmp_path, monkeypatch)
    name = "text-encoder(weights=minilm)"
    sizes: dict[str, Any] = {"classes": 3, "channels": 24, "image_size": 1, "text": SCHEMA}
    with torch.device("meta"):
        outline = create_model(name, **sizes)
    model = create_model(name, **sizes)
    assert all(value.is_meta for value in outline.parameters())
    own = dict(model.named_parameters())
    for key, value in packaged.named_parameters():
        assert torch.equal(own[f"body.bert.{key}"], value)


def test_a_model_of_images_takes_no_texts() -> None:
    with refused("input-mismatch", "lenet", "text-encoder"):
        create_model("lenet", classes=5, channels=24, image_size=1, text=SCHEMA)
    with refused("input-mismatch", "text-encoder"):
        create_model("text-encoder", classes=5, channels=1, image_size=32)
