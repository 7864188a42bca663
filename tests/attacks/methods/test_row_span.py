from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from refusals import check_refusal

from bract.attacks import (
    Budget,
    Case,
    Entered,
    Reading,
    Reconstruction,
    Refusal,
    attack,
    reconstruct,
)
from bract.attacks.methods.row_span.row_span import class_counts
from bract.attacks.methods.row_span.spans import Spans
from bract.attacks.problem.case import open_case
from bract.data.views import data_spec
from experiments.harness.rows import SentRows, config_of, features_right, score_rows, send_rows
from experiments.tables import noised


def attacked(sent: SentRows, rounds: int = 12) -> Reconstruction | Refusal:
    (found,) = reconstruct(
        sent.captured, "row-span", budget=Budget(iterations=rounds), device="cpu"
    )
    return found


def inputs_of(sent: SentRows) -> torch.Tensor:
    declared = sent.captured.declaration
    mean, std = (torch.tensor(v).double() for v in (declared.mean, declared.std))
    return (sent.truth.images.flatten(1).double() - mean) / std


@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_every_row_of_a_batch_is_found_with_its_target(data: str) -> None:
    sent = send_rows(data, 6, seed=0)
    found = attacked(sent)
    assert isinstance(found, Reconstruction), found
    scored = score_rows(sent, found)
    assert features_right(scored) == 1.0 and scored.label_accuracy == 1.0


def test_a_batch_larger_than_a_row_has_columns_is_found() -> None:
    # SPEAR needs fewer rows than the 13 columns; here a row has the second layer's equations.
    sent = send_rows("wine", 16, seed=2)
    found = attacked(sent, rounds=20)
    assert isinstance(found, Reconstruction), found
    assert features_right(score_rows(sent, found)) > 0.9


def test_categories_are_found_through_their_embeddings() -> None:
    spec = data_spec(config_of("diabetes"))
    assert spec.table is not None
    columns = tuple(
        replace(c, encoder=None if c.is_number else "embedding") for c in spec.table.columns
    )
    embedded = replace(spec, table=replace(spec.table, columns=columns))
    sent = send_rows("diabetes", 4, seed=0, model="table-embedding", spec=embedded)
    found = attacked(sent)
    assert isinstance(found, Reconstruction), found
    assert features_right(score_rows(sent, found)) == 1.0


def test_rows_are_found_after_local_epochs() -> None:
    sent = send_rows("wine", 8, seed=1, algorithm="fedavg", batch_size=8, local_epochs=3, lr=0.01)
    found = attacked(sent)
    assert isinstance(found, Reconstruction), found
    assert features_right(score_rows(sent, found)) > 0.8


def spans_of(case: Case) -> Spans:
    method = attack("row-span")
    assert isinstance(method, Reading)
    read = method.read(case)
    assert isinstance(read, Entered)
    return Spans(case, read)


def test_true_rows_lie_in_the_spans_and_others_do_not() -> None:
    sent = send_rows("wine", 4, seed=0)
    case = open_case(sent.captured, tier="oblivious", max_images=8)
    assert isinstance(case, Case)
    spans = spans_of(case)
    rows = inputs_of(sent)
    assert float(spans.losses(rows).max()) < 1e-8
    assert float(spans.losses(rows + 0.5).min()) > 1e-4


def test_the_jacobian_is_that_of_finite_differences() -> None:
    sent = send_rows("wine", 2, seed=0)
    case = open_case(sent.captured, tier="oblivious", max_images=8)
    spans, places = spans_of(case), torch.tensor([0, 5])
    rows = inputs_of(sent) + 0.3
    found = spans.jacobian(rows, places)
    for at, place in enumerate(places.tolist()):
        step = torch.zeros_like(rows)
        step[:, place] = 1e-6
        apart = (spans.residuals(rows + step) - spans.residuals(rows - step)) / 2e-6
        assert torch.allclose(found[:, :, at], apart.detach(), atol=1e-5)


def test_slopes_count_copies_of_a_row() -> None:
    shares = torch.tensor([0.3, 0.7])
    for counts in ([1, 0], [0, 1], [2, 0], [1, 2]):
        n = torch.tensor(counts, dtype=torch.float)
        assert class_counts(shares, n.sum() * shares - n, 4).tolist() == counts


def test_a_row_that_is_there_twice_is_returned_twice() -> None:
    once = send_rows("wine", 3, seed=0)
    picks = [0, 1, 1, 2]
    network, normalise = _network(once)
    inputs, labels = once.truth.images[picks], once.truth.labels[picks]
    loss = torch.nn.functional.cross_entropy(network(normalise(inputs)), labels)
    names = [name for name, _ in network.named_parameters()]
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    declared = replace(once.captured.declaration, batch_size=4, num_examples=4)
    upload = replace(
        once.captured, update=dict(zip(names, gradients, strict=True)), declaration=declared
    )
    sent = replace(once, captured=upload, truth=replace(once.truth, images=inputs, labels=labels))
    found = attacked(sent)
    assert isinstance(found, Reconstruction), found
    scored = score_rows(sent, found)
    assert features_right(scored) == 1.0 and scored.label_accuracy == 1.0


def _network(sent: SentRows) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    case = open_case(sent.captured, tier="oblivious", max_images=8)
    model = case.target_model.model
    model.load_state_dict(dict(sent.captured.parameters))
    return model, case.target_model.normalise


def test_what_leaves_too_few_equations_is_refused_by_number() -> None:
    found = attacked(send_rows("wine", 2, seed=0, model="logistic"))
    check_refusal(found, "attack-unsuited", "columns")


def test_steps_of_adam_are_refused() -> None:
    sent = send_rows("wine", 4, seed=0, algorithm="fedavg", batch_size=2, optimizer="adam")
    found = attacked(sent)
    check_refusal(found, "attack-unsuited", "SGD")


def under_noise(sent: SentRows, deviation: float) -> SentRows:
    return replace(sent, captured=noised(sent.captured, deviation, 3))


def test_under_noise_true_rows_are_off_by_what_it_makes_and_others_by_more() -> None:
    sent = under_noise(send_rows("wine", 6, seed=0), 1e-4)
    case = open_case(sent.captured, tier="adaptive", max_images=8)
    spans = spans_of(case)
    rows = inputs_of(sent)
    # Of 6 rows and some hundred coordinates the mean square is 1 within a tenth or so.
    assert 0.7 < float(spans.losses(rows).mean()) < 1.4
    assert float(spans.losses(rows + 0.5).min()) > 10.0


@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_rows_are_found_under_known_noise(data: str) -> None:
    sent = under_noise(send_rows(data, 4, seed=0), 1e-4)
    (found,) = reconstruct(
        sent.captured, "row-span", budget=Budget(iterations=6), tier="adaptive", device="cpu"
    )
    assert isinstance(found, Reconstruction), found
    scored = score_rows(sent, found)
    assert features_right(scored) > 0.9


def test_noise_that_hides_a_row_is_refused() -> None:
    sent = under_noise(send_rows("wine", 8, seed=0), 0.1)
    (found,) = reconstruct(
        sent.captured, "row-span", budget=Budget(iterations=2), tier="adaptive", device="cpu"
    )
    check_refusal(found, "attack-unsuited", "above the noise")
