"""Labels of tokens: what a client's loss is, and how they are read off the output layer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch import Tensor
from torch.nn import functional as F

from bract import Observation
from bract.attacks import Budget, Problem, attack
from bract.attacks.methods.token_span.subtraction import subtracted
from bract.attacks.methods.token_span.tags import _by_output, infer_tags, tags_of_text
from bract.attacks.problem.case import open_case
from bract.client.defenses import build_defense
from bract.config.text import TextSchema
from bract.data.tokens import UNLABELLED, as_example, ids_of
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.losses import label_rows, loss_of
from bract.schema import ClientDeclaration
from bract.scores.text import TextScorer, tag_accuracy
from bract.updates.update import buffers_of, parameters_of

pytest.importorskip("transformers")

SCHEMA = TextSchema(
    vocabulary=120, length=10, special=(0, 1, 2), task="token-classification", tags=4
)
TOKENS = loss_of("token_cross_entropy")
ENCODER = "text-encoder(width=64, depth=2, heads=2)"


def tagged(count: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random texts ``(count, length)``, and labels of which some are none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SCHEMA.vocabulary, (count, SCHEMA.length), generator=generator)
    ids[:, 0], ids[:, -1] = 1, 2
    ids[-1, -3:] = torch.tensor([2, 0, 0])
    labels = torch.randint(SCHEMA.tags, ids.shape, generator=generator)
    labels[(ids < 3) | (torch.rand(ids.shape, generator=generator) < 0.2)] = UNLABELLED
    return ids, labels


def upload(name: str, ids: Tensor, labels: Tensor) -> Observation:
    model = create_model(
        name, classes=40, channels=SCHEMA.length, image_size=1, activation="", text=SCHEMA
    )
    initialise(model, "default", 3)
    model.eval()
    TOKENS.mean(model(ids), labels).backward()
    mean, std = SCHEMA.feature_moments()
    return Observation(
        round=1,
        client="a",
        parameters=parameters_of(model),
        buffers=buffers_of(model),
        returned_buffers={},
        update={n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            model=name,
            input="text",
            image_shape=(SCHEMA.length, 1, 1),
            classes=40,
            mean=mean,
            std=std,
            text=SCHEMA,
            loss=SCHEMA.objective,
            local_steps=1,
            batch_size=len(ids),
            num_examples=len(ids),
            norm_mode="eval",
        ),
    )


def read(name: str, ids: Tensor, labels: Tensor, *, seconds: float = 20.0) -> tuple[Tensor, Tensor]:
    """Return token ids and labels as an attacker reads them, in the order of the originals."""
    found = attack("token-span", seconds=seconds)(
        upload(name, ids, labels), budget=Budget(max_images=len(ids))
    )
    back = ids_of(found.images, SCHEMA)
    same = (back[None] == ids[:, None]).sum(dim=2)
    order = same.argmax(dim=1)
    rows = found.label_probabilities[order].unflatten(1, (SCHEMA.length, SCHEMA.tags))
    named = torch.where(rows.sum(dim=2) > 0, rows.argmax(dim=2), UNLABELLED)
    return back[order], named


def test_the_loss_of_a_text_is_the_mean_over_its_labelled_tokens() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, UNLABELLED, 3], [0, UNLABELLED, UNLABELLED]])
    slow = torch.stack([F.cross_entropy(row, own) for row, own in zip(logits, labels, strict=True)])
    outputs = logits.log_softmax(dim=-1).flatten(1)
    torch.testing.assert_close(TOKENS.mean(outputs, labels), slow.mean())
    rows = label_rows(labels, 12, TOKENS)
    assert rows.sum(dim=1).tolist() == [2, 1] and int(rows[0, 4:8].sum()) == 0


def test_an_attacker_who_would_guess_every_token_s_label_is_refused() -> None:
    seen = upload(ENCODER, *tagged(1, seed=1))
    guardian = build_defense({"name": "guardian"}).public()
    seen = replace(seen, declaration=replace(seen.declaration, defenses=(guardian,)))
    with refused("attack-unsuited"):
        attack("token-span")(seen, tier="adaptive", budget=Budget(max_images=1))


def test_a_prediction_is_right_by_the_share_of_labelled_tokens() -> None:
    outputs = torch.tensor([[0.0, -1, -1, 0, 0, -1], [0.0, -1, 0, -1, 0, -1]])
    labels = torch.tensor([[0, 1, 1], [UNLABELLED] * 3])
    assert TOKENS.right(outputs, labels).tolist() == pytest.approx([2 / 3, 0.0])


@pytest.mark.parametrize("count", [1, 3])
def test_an_encoder_gives_away_tokens_and_their_labels(count: int) -> None:
    ids, labels = tagged(count, seed=1)
    back, named = read(ENCODER, ids, labels)
    assert torch.equal(back, ids) and torch.equal(named, labels)


@pytest.mark.slow
def test_texts_with_their_tags_are_taken_out_so_that_all_of_four_are_read() -> None:
    ids, labels = tagged(4, seed=4)
    back, named = read(ENCODER, ids, labels)
    assert torch.equal(back, ids) and torch.equal(named, labels)


def model_of(seen: Observation, name: str) -> torch.nn.Module:
    model = create_model(
        name, classes=40, channels=SCHEMA.length, image_size=1, activation="", text=SCHEMA
    )
    model.load_state_dict(seen.parameters | seen.buffers)
    return model.eval()


@pytest.mark.parametrize("shared", [0, 2])
def test_one_text_s_tags_are_read_whatever_the_others_are(shared: int) -> None:
    ids, labels = tagged(3, seed=6)
    ids[1, 4 : 4 + shared] = ids[0, 4 : 4 + shared]  # rows that two texts make
    seen = upload(ENCODER, ids, labels)
    model = model_of(seen, ENCODER)
    (embedding,) = [n for n, p in model.named_parameters() if p.shape[0] == SCHEMA.vocabulary]
    for text, own in zip(ids[:2], labels[:2], strict=True):
        found = tags_of_text(model, seen.update, text, embedding=embedding, tags=SCHEMA.tags)
        assert torch.equal(found, own[None])
        left = subtracted(
            model,
            seen.update,
            text,
            embedding=embedding,
            weight=1 / 3,
            loss=TOKENS,
            labels=[found],
        )
        assert left is not None and torch.equal(left[1], own[None])
    other = ids[0].roll(1)
    wrong = tags_of_text(model, seen.update, other, embedding=embedding, tags=SCHEMA.tags)
    taken = {"embedding": embedding, "weight": 1 / 3, "loss": TOKENS, "labels": [wrong]}
    assert subtracted(model, seen.update, other, **taken) is None  # type: ignore[arg-type]


def test_slopes_of_one_pass_are_those_of_each_output_alone() -> None:
    ids, labels = tagged(1, seed=7)
    seen = upload(ENCODER, ids, labels)
    model = model_of(seen, ENCODER)
    parameters = dict(model.named_parameters())
    (embedding,) = [n for n, p in parameters.items() if p.shape[0] == SCHEMA.vocabulary]
    fast, logs = _by_output(model, ids[0], embedding, SCHEMA.tags)
    outputs = model(ids)
    torch.testing.assert_close(logs.flatten(), outputs[0].detach().double())
    for output in range(0, 40, 7):
        (slow,) = torch.autograd.grad(outputs[0, output], parameters[embedding], retain_graph=True)
        for token in ids[0].unique()[1:]:  # padding has no gradient
            own = fast[output, ids[0] == token].sum(dim=0)
            torch.testing.assert_close(own, slow[token].double(), atol=1e-6, rtol=1e-4)


def test_certain_labels_stay_where_another_text_is_wrong_and_make_room_for_it() -> None:
    ids, labels = tagged(3, seed=1)
    case = open_case(upload(ENCODER, ids, labels), tier="oblivious", max_images=3, unroll=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    wrong = ids.clone()
    wrong[2, 1:9] = 5
    known = [[labels[0, None], labels[1, None]]]
    assert torch.equal(tags_of(problem, wrong, known)[:2], labels[:2])
    assert not torch.equal(tags_of(problem, wrong)[:2], labels[:2])
    assert torch.equal(tags_of(problem, ids, known), labels)
    assert torch.equal(tags_of(problem, ids, [[own[None] for own in labels]]), labels)


def test_texts_with_one_beginning_share_its_slope_in_a_decoder() -> None:
    ids, labels = tagged(3, seed=2)
    labels[:, -4:] = UNLABELLED  # what nothing follows has no gradient
    labels[:, 1] = 0
    back, named = read("text-decoder(width=64, depth=2, heads=2)", ids, labels)
    there = labels >= 0
    assert torch.equal(back[there], ids[there]) and torch.equal(named[there], labels[there])


def test_more_tokens_than_the_layer_has_inputs_leave_every_label_open() -> None:
    ids, labels = tagged(4, seed=3)
    _, named = read("text-encoder(width=16, depth=2, heads=2)", ids, labels, seconds=1.0)
    assert bool((named == UNLABELLED).all())


@pytest.mark.parametrize("name", ["labels", "tag", "sim", "lamp"])
def test_an_attack_that_takes_one_label_a_text_refuses_by_name(name: str) -> None:
    with refused("attack-unsuited", name):
        attack(name)(upload(ENCODER, *tagged(1, seed=4)))


def test_labels_are_scored_at_the_places_of_their_tokens() -> None:
    labels = torch.tensor([[0, 1, UNLABELLED]])
    rows = F.one_hot(torch.tensor([[0, 0, 1]]), 2).flatten(1).float()
    assert tag_accuracy(rows, labels) == 0.5
    assert tag_accuracy(torch.zeros_like(rows), labels) == 0.0
    assert tag_accuracy(rows, torch.full_like(labels, UNLABELLED)) is None


def test_a_schema_without_tags_or_with_tags_of_another_task_is_refused() -> None:
    for wrong in ({"tags": 0}, {"task": "classification"}):
        with pytest.raises(ValueError, match="token-classification needs 2 or more"):
            replace(SCHEMA, **wrong)


def test_a_page_says_what_the_share_of_labels_is_of() -> None:
    assert any("at the token's place" in note for note in TextScorer(SCHEMA, None).notes())
    plain = replace(SCHEMA, task="classification", tags=0)
    assert not any("at the token's place" in note for note in TextScorer(plain, None).notes())


def tags_of(problem: Problem, ids: Tensor, certain: Sequence[Sequence[Tensor]] = ()) -> Tensor:
    texts = torch.stack([as_example(row, SCHEMA) for row in ids])
    rows = infer_tags(problem, texts[None].double(), certain)[0]
    rows = rows.unflatten(1, (SCHEMA.length, SCHEMA.tags))
    return torch.where(rows.sum(dim=2) > 0, rows.argmax(dim=2), UNLABELLED)


@pytest.mark.parametrize("known", [0.7, 0.1])
def test_labels_are_read_off_the_coordinates_that_count(known: float) -> None:
    """Of 65 coordinates a tag, 45 determine a text's slopes; 6 do with the signs of slopes."""
    ids, labels = tagged(1, seed=5)
    case = open_case(upload(ENCODER, ids, labels), tier="oblivious", max_images=1, unroll=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    head = {n: v for n, v in problem.target.items() if v.shape[1] == SCHEMA.tags}
    assert len(head) == 2  # weight and bias
    draws = {n: torch.rand(v.shape, generator=generator) for n, v in head.items()}
    counts = {n: (drawn < known).double() for n, drawn in draws.items()}
    wrong = {n: torch.where(counts[n] > 0, v, 9.0 * v.flip(-1)) for n, v in head.items()}
    spoilt = replace(problem, target=problem.target | wrong)
    assert not torch.equal(tags_of(spoilt, ids), labels)
    assert torch.equal(tags_of(replace(spoilt, weights=counts), ids), labels)
