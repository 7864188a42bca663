"""The schema of a third-party app's texts: what is found, and what is refused by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audited import attacked_run
from refusals import refused
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.audit.description.texts import doubt_tokenizer, text_schema_of
from bract.cli.describe import describe_app
from bract.config.text import TextSchema
from bract.data.tokens import Tokenizer, word_tokenizer
from bract.inputs.base import FILLING
from bract.models.third_party_texts import of_texts
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.updates.update import difference, parameters_of

HERE = "test_description_of_texts"


class Outputs(SimpleNamespace):
    """What a model of transformers returns."""

    logits: Tensor


class Keywords(nn.Module):
    """Called as models of transformers are, at most sixteen tokens of a vocabulary of fifty."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=16, pad_token_id=3)
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Outputs:
        seen = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask[..., None].to(seen)
        logits = self.head((self.mix(seen).tanh() * weights).sum(1) / weights.sum(1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Outputs(logits=logits, loss=loss)


def model() -> nn.Module:
    torch.manual_seed(1)
    return Keywords()


class Masked(Keywords):
    """Takes its mask by place, as people's own models of texts do; it has no mean of padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(input_ids, attention_mask).logits
        return found


def masked() -> nn.Module:
    torch.manual_seed(1)
    return Masked()


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 2))


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Captures of one client that took a step of Adam on texts of nine tokens."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    trained = model()
    before = parameters_of(trained)
    ids = torch.randint(4, 50, (3, 9), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    trained(input_ids=ids, labels=torch.tensor([0, 1, 0])).loss.backward()
    optimizer.step()
    ObservationStore(tmp_path / "captures").save(
        Observation(
            round=1,
            client="node-1",
            parameters=before,
            update=difference(before, parameters_of(trained)),
            declaration=ClientDeclaration(num_examples=3, batch_size=3, local_steps=1, lr=1e-3),
        )
    )
    return tmp_path


def keep_texts(app: Path, ids: Tensor) -> Path:
    """Write what the client would have kept; the model sees `FILLING` nowhere."""
    path = app / "kept" / "node-1" / "round-0001.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"inputs": ids, "labels": torch.tensor([0, 1, 0])}, path)
    return app / "kept"


def declare(app: Path, **declared: Any) -> None:
    """Declare more of the client in its capture."""
    store = ObservationStore(app / "captures")
    (seen,) = store
    store.save(replace(seen, declaration=seen.declaration.updated(declared)))


def test_a_model_that_takes_its_mask_by_place_is_described_and_its_labels_read(app: Path) -> None:
    describe_app(app, {}, model=f"{HERE}:masked", truth=keep_texts(app, KEPT), force=True)
    described = RunDirectory(app).description()
    assert described is not None and described.input.text is not None
    assert described.input.text.task == "classification"
    (found,) = attacked_run(app, attacks=["labels"], device="cpu", models=[f"{HERE}:masked"])
    assert not found.refused and len(found.images) == 3


KEPT = torch.tensor([[5, 9, 8, 6], [5, 7, 6, FILLING], [5, 4, 4, 6]])


@pytest.mark.parametrize("by", ["person", "app", "nobody"])
@pytest.mark.parametrize("truth", [True, False])
def test_texts_are_inferred_also_where_the_kind_of_input_is_given(
    app: Path, by: str, truth: bool
) -> None:
    if by == "app":
        declare(app, input="text")
    settings = {"input.kind": "text"} if by == "person" else {}
    where = keep_texts(app, KEPT) if truth else None
    # What is kept here is not what was trained on, which the check of a description finds.
    describe_app(app, settings, model=f"{HERE}:model", truth=where, force=truth)
    described = RunDirectory(app).description()
    assert described is not None and described.classes == 2
    length, special = (4, (5, 6)) if truth else (9, ())
    wanted = TextSchema(vocabulary=50, length=length, padding=3, special=special)
    assert described.input.text == wanted
    assert {"input.text.vocabulary", "input.text.length"} <= set(described.guessed)


@pytest.mark.parametrize("by", ["person", "app"])
def test_a_model_without_an_embedding_shows_no_schema_of_texts(app: Path, by: str) -> None:
    if by == "app":
        declare(app, input="text")
    settings = {"input.kind": "text"} if by == "person" else {}
    with refused("declaration-wrong", "bract.yaml", "input"):
        describe_app(app, settings, model=f"{HERE}:linear")


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("named", [{"input": "text"}, {}])
def test_shape_and_statistics_follow_from_the_schema_that_an_app_declares(
    app: Path, truth: bool, named: dict[str, str]
) -> None:
    schema = TextSchema(vocabulary=50, length=9, padding=3)
    declare(app, **named, text=asdict(schema))
    where = keep_texts(app, torch.full((3, 9), 4)) if truth else None
    describe_app(app, {}, model=f"{HERE}:model", truth=where, force=truth)
    described = RunDirectory(app).description()
    assert described is not None and described.input.text == schema
    assert not [key for key in described.guessed if key.startswith("input")]
    (seen,) = ObservationStore(app / "captures")
    declared = described.declare(seen.declaration, "node-1")
    assert declared.image_shape == (9, 1, 1)
    assert (declared.mean, declared.std) == schema.feature_moments()


def test_kept_texts_without_a_token_show_no_length(app: Path) -> None:
    found: Any = model()
    (seen,) = ObservationStore(app / "captures")
    empty = [torch.full((2, 5), FILLING), torch.zeros((2, 0), dtype=torch.int64)]
    schema, reasons = text_schema_of(found, found.words, empty, seen.update, None)
    assert schema.length == 9 and "places" in reasons["length"]
    schema, reasons = text_schema_of(found, found.words, [*empty, KEPT], seen.update, None)
    assert schema.length == 4 and reasons["length"] == "the longest text that clients kept"


def test_kept_texts_of_padding_alone_leave_the_length_to_the_positions(app: Path) -> None:
    kept = keep_texts(app, torch.full((3, 5), FILLING))
    describe_app(app, {}, model=f"{HERE}:model", truth=kept)
    described = RunDirectory(app).description()
    assert described is not None and described.input.text is not None
    assert described.input.text.length == 9 and "places" in described.guessed["input.text.length"]


def test_kept_texts_of_no_width_are_refused_in_one_line(
    app: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keep_texts(app, torch.zeros((3, 0), dtype=torch.int64))
    with refused("truth-unusable", "round-0001.safetensors"):
        describe_app(app, {}, model=f"{HERE}:model", truth=kept)
    assert "inputs of shape (3, 0) hold no token" in caplog.text


def test_without_kept_texts_the_length_is_that_of_the_positions_that_moved(app: Path) -> None:
    describe_app(app, {}, model=f"{HERE}:model")
    described = RunDirectory(app).description()
    assert described is not None and described.classes == 2
    assert described.input.text == TextSchema(vocabulary=50, length=9, padding=3)
    assert "places" in described.guessed["input.text.length"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"vocabulary": 51, "length": 9}, ("model-mismatch", "51", "50")),
        ({"vocabulary": 50, "length": 17}, ("model-mismatch", "17", "16")),
        ({"vocabulary": 50, "length": 9, "padding": 50}, ("config-value", "vocabulary", "50")),
    ],
)
def test_a_schema_that_the_model_does_not_fit_is_refused_by_name(
    text: dict[str, Any], named: tuple[str, ...], app: Path
) -> None:
    with refused(*named) as caught:
        describe_app(app, {"input.text": text}, model=f"{HERE}:model")
    assert "bract.yaml" in str(caught.value) and "input.text" in str(caught.value)
    assert not (app / "bract.yaml").exists()


def test_a_tokenizer_of_another_model_is_refused_by_its_file() -> None:
    tokenizer = word_tokenizer(["one two three four"])
    assert tokenizer.vocabulary > 50
    found: Any = model()
    with refused("model-mismatch", 50):
        text_schema_of(found, found.words, [], {}, tokenizer)


def tokenizer_of(ids: int) -> Tokenizer:
    """A tokenizer of so many words."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    words = {f"w{i}": i for i in range(ids)}
    return Tokenizer(Library(models.WordLevel(words, unk_token="w0")).to_str(), "tokenizer.json")


def write_tokenizer(folder: Path, ids: int) -> dict[str, Any]:
    """Write a tokenizer, and return the settings that name it."""
    (folder / "tokenizer.json").write_text(tokenizer_of(ids).content)
    named = {"name": "clinical-notes", "input": "text", "text": {"tokenizer": str(folder)}}
    return {"data": named}


@pytest.mark.parametrize("schema", [None, TextSchema(vocabulary=50, length=9, padding=3)])
def test_a_tokenizer_with_fewer_ids_than_clients_texts_use_is_refused(
    app: Path, schema: TextSchema | None
) -> None:
    if schema is not None:
        declare(app, input="text", text=asdict(schema))
    kept = keep_texts(app, torch.tensor([[5, 9, 8], [5, 47, 6], [4, 5, 6]]))
    settings = write_tokenizer(app, 40)
    with refused("model-mismatch", 47, "tokenizer", 40) as caught:
        describe_app(app, settings, model=f"{HERE}:model", truth=kept)
    assert "tokenizer.json" in str(caught.value)


@pytest.mark.parametrize(("ids", "doubted"), [(40, True), (50, False)])
def test_a_tokenizer_with_fewer_ids_than_the_embedding_has_rows_is_doubted(
    app: Path, ids: int, doubted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    describe_app(app, write_tokenizer(app, ids), model=f"{HERE}:model", as_json=True)
    wanted = f"the tokenizer has {ids} token ids, the clients' vocabulary 50"
    assert (wanted in capsys.readouterr().out) is doubted


def test_a_declared_fingerprint_of_another_tokenizer_is_refused_by_name(app: Path) -> None:
    schema = TextSchema(vocabulary=50, length=9, padding=3, tokenizer="0" * 16)
    declare(app, input="text", text=asdict(schema))
    with refused("config-conflict"):
        describe_app(app, write_tokenizer(app, 50), model=f"{HERE}:model")


def test_rows_of_the_embedding_show_tokens_that_a_tokenizer_lacks() -> None:
    schema, small = TextSchema(vocabulary=50, length=9), tokenizer_of(40)
    sparse = torch.zeros(50, 8)
    sparse[[3, 45]] = 1.0
    with refused("model-mismatch", 45, "words.weight", 40):
        doubt_tokenizer(small, schema, [], {"words.weight": sparse}, "words.weight")
    # Where every row moved, as under weight decay, rows show no tokens.
    dense = {"words.weight": torch.ones(50, 8)}
    doubt = doubt_tokenizer(small, schema, [], dense, "words.weight")
    assert doubt is not None and "40 token ids" in doubt
    assert doubt_tokenizer(tokenizer_of(50), schema, [], dense, "words.weight") is None


def test_special_tokens_are_those_with_which_every_kept_text_begins_or_ends() -> None:
    found: Any = model()
    kept = [torch.tensor([[1, 9, 8, 2], [1, 7, 2, FILLING]]), torch.tensor([[1, 5, 6, 2]])]
    schema, reasons = text_schema_of(found, found.words, kept, {}, None)
    assert (schema.length, schema.special) == (4, (1, 2))
    assert set(reasons) == {"vocabulary", "length", "padding", "special", "task"}


def test_a_model_called_with_keywords_gives_the_logits_that_the_app_sees() -> None:
    ids = torch.tensor([[9, 8, 7, 3, 3], [9, 8, 7, 6, 5]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    wanted = model()(input_ids=ids, attention_mask=mask).logits
    adapted = of_texts(model(), TextSchema(vocabulary=50, length=5, padding=3))
    assert torch.equal(adapted(ids), wanted)
    # The app's own call stays as it is.
    again = adapted(input_ids=ids, attention_mask=mask)
    assert torch.equal(again if isinstance(again, Tensor) else again.logits, wanted)
