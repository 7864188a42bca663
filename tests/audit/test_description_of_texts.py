"""The schema of a third-party app's texts: what is found, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.audit.description.texts import text_schema_of
from bract.cli.describe import describe_app
from bract.config.text import TextSchema
from bract.data.tokens import word_tokenizer
from bract.errors import BractError
from bract.inputs.base import FILLING
from bract.models.third_party_texts import of_texts
from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.protocol.update import difference, parameters_of
from bract.rundir import RunDirectory

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


def test_without_kept_texts_the_length_is_that_of_the_positions_that_moved(app: Path) -> None:
    describe_app(app, {}, model=f"{HERE}:model")
    described = RunDirectory(app).description()
    assert described is not None and described.classes == 2
    assert described.input.text == TextSchema(vocabulary=50, length=9, padding=3)
    assert "places" in described.guessed["input.text.length"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ({"vocabulary": 51, "length": 9}, "has 51 token ids, the model's embedding 50 rows"),
        ({"vocabulary": 50, "length": 17}, "17 tokens, the model's longest sequence is 16"),
        ({"vocabulary": 50, "length": 9, "padding": 50}, "beyond the vocabulary of 50 ids"),
    ],
)
def test_a_schema_that_the_model_does_not_fit_is_refused_by_name(
    text: dict[str, Any], named: str, app: Path
) -> None:
    with pytest.raises(BractError, match=named) as refused:
        describe_app(app, {"input.text": text}, model=f"{HERE}:model")
    assert "bract.yaml" in str(refused.value) and "input.text" in str(refused.value)
    assert not (app / "bract.yaml").exists()


def test_a_tokenizer_of_another_model_is_refused_by_its_file() -> None:
    tokenizer = word_tokenizer(["one two three four"])
    assert tokenizer.vocabulary > 50
    found: Any = model()
    with pytest.raises(BractError, match=r"tokenizer has \d+ token ids, the model's embedding 50"):
        text_schema_of(found, found.words, [], {}, tokenizer)


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
