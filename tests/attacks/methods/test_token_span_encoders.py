from typing import Any

import pytest
import torch
from torch import Tensor

from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.orders import at_places
from bract.attacks.methods.token_span.relaxed import relax
from bract.attacks.methods.token_span.sequences import Candidates, Checked
from bract.attacks.methods.token_span.stages import find_stages
from bract.attacks.methods.token_span.subtraction import subtracted
from bract.attacks.methods.token_span.token_positions import positions_of
from bract.attacks.reading.span import span_of
from bract.config.text import TextSchema
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.losses import loss_of

pytest.importorskip("transformers")

SCHEMA = TextSchema(vocabulary=120, length=10, special=(0, 1, 2))
ENCODER = "text-encoder(width=64, depth=2, heads=2)"
DECODER = "text-decoder(width=64, depth=2, heads=2)"
EMBEDDING = "body.bert.embeddings.word_embeddings.weight"
TEXTS = torch.tensor(
    [
        [1, 10, 11, 12, 13, 14, 2, 0, 0, 0],
        [1, 20, 11, 21, 22, 2, 0, 0, 0, 0],
        [1, 30, 31, 32, 33, 12, 34, 35, 2, 0],
    ]
)
LABELS = torch.tensor([0, 1, 2])


def network(name: str) -> Any:
    model = create_model(name, classes=3, channels=10, image_size=1, text=SCHEMA)
    initialise(model, "default", 3)
    return model.eval()


def gradients(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = loss_of(SCHEMA.objective).mean(model(ids), labels)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def placed(model: Any, name: str, own: dict[str, Tensor], tokens: Tensor) -> dict[int, int]:
    return positions_of(model, model.get_parameter(name), own[name], tokens, SCHEMA.length)


def test_a_slope_is_orthogonal_to_the_embedding_at_its_own_position_alone() -> None:
    model = network(ENCODER)
    own = gradients(model, TEXTS, LABELS)
    found = placed(model, EMBEDDING, own, TEXTS.unique()[1:])
    # 12 is at two positions, and so is 2; 11 is at the same one in two texts.
    assert found == {
        int(token): place
        for text in TEXTS
        for place, token in enumerate(text)
        if token not in (0, 2, 12)
    }


@pytest.mark.parametrize("kind", ["bfloat16", "noise"])
def test_positions_are_read_through_rounding_and_noise(kind: str) -> None:
    model = network(ENCODER)
    own = gradients(model, TEXTS, LABELS)
    generator = torch.Generator().manual_seed(0)
    row = own[EMBEDDING]
    noise = 1e-4 * row.norm(dim=1).max() / 8.0 * torch.randn(row.shape, generator=generator)
    own[EMBEDDING] = row.bfloat16().float() if kind == "bfloat16" else row + noise
    found = placed(model, EMBEDDING, own, TEXTS.unique()[1:])
    right = {int(t): place for text in TEXTS for place, t in enumerate(text) if t}
    assert len(found) >= 8 and all(right[token] == place for token, place in found.items())


def test_a_model_that_sees_the_length_of_embeddings_gives_no_position_away() -> None:
    model = network(DECODER)
    name = "body.transformer.wte.weight"
    assert placed(model, name, gradients(model, TEXTS, LABELS), TEXTS.unique()[1:]) == {}


def test_a_text_is_taken_out_of_an_update_with_its_label() -> None:
    model = network(ENCODER)
    own = gradients(model, TEXTS, LABELS)
    rest = gradients(model, TEXTS[1:], LABELS[1:])
    kwargs: Any = {
        "embedding": EMBEDDING,
        "weight": 1 / 3,
        "loss": loss_of(SCHEMA.objective),
        "labels": [torch.tensor([own]) for own in range(3)],
    }
    taken = subtracted(model, own, TEXTS[0][:7], **kwargs)
    assert taken is not None
    left, label = taken
    assert label.tolist() == [int(LABELS[0])]
    for name, value in rest.items():
        torch.testing.assert_close(left[name], value * 2 / 3, atol=1e-6, rtol=1e-3)
    assert not bool(left[EMBEDDING][[10, 13, 14]].any())
    swapped = TEXTS[0][:7].clone()
    swapped[[1, 3]] = swapped[[3, 1]]
    assert subtracted(model, own, swapped, **kwargs) is None


def test_tokens_at_one_position_go_to_different_texts() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(8, 1, 64, generator=generator) + torch.randn(1, 4, 64, generator=generator)
    directions = torch.linalg.qr(torch.randn(24, 2, generator=generator))[0].T
    # Token 3 of the first text points to the second one's direction, where token 7 has its place.
    slopes = directions[[0, 0, 0, 1, 1, 1, 1, 1]] + torch.tensor(
        [[0.0]] * 3 + [[0.05]] + [[0.0]] * 4
    )
    slopes[3] += 0.9 * directions[0]
    places = {token: token % 4 for token in range(8)}
    gradient = sum(slopes[t][:, None] * inputs[t, p][None] for t, p in places.items())
    assert isinstance(gradient, Tensor)
    bags = bags_of(
        torch.arange(8),
        inputs,
        gradient,
        count=2,
        special=torch.tensor([99]),
        generator=generator,
        places=places,
    )
    assert sorted(sorted(bag.placed.values()) for bag in bags) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_token_with_a_known_position_is_a_candidate_nowhere_else() -> None:
    found = at_places(None, torch.tensor([5, 6, 7]), {6: 1}, 3)
    assert found is not None
    assert [at.tolist() for at in found.tokens] == [[5, 7], [5, 6, 7], [5, 7]]


def test_mixtures_of_tokens_descend_to_the_text() -> None:
    model = network(ENCODER)
    own = gradients(model, TEXTS, LABELS)
    stages = find_stages(model, list(own), vocabulary=SCHEMA.vocabulary, length=8)
    layers = stages.contextual[:3]
    checked = Checked(layers, tuple(span_of([layer.rows(own)]) for layer in layers))
    text = TEXTS[0][:7]
    others = torch.arange(40, 60)
    allowed = Candidates(tuple(torch.cat([token[None], others]) for token in text), threshold=0.01)
    found = relax(
        model,
        checked,
        allowed,
        {0: 1, 6: 2},
        embedding=EMBEDDING,
        generator=torch.Generator().manual_seed(0),
    )
    assert int((found == text).sum()) >= 6
