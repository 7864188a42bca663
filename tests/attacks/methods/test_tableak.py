from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import check_refusal

from bract.attacks import Budget, Case, Reconstruction, attack, reconstruct
from bract.attacks.methods.tableak.pooling import pooled
from bract.attacks.methods.tableak.row_search import Groups
from bract.attacks.problem.case import open_case
from bract.attacks.solve.targets import infer_targets
from bract.config.table import Column, TableSchema, Target
from bract.data.rows import project
from experiments.harness.rows import SentRows, features_right, score_rows, send_rows

SCHEMA = TableSchema(
    (
        Column("x", low=0.0, high=1.0, std=0.2),
        Column("c", "categorical", categories=("a", "b", "c")),
    ),
    Target("y", ("no", "yes")),
)


def attacked(sent: SentRows, name: str, **settings: object) -> Reconstruction:
    budget = Budget(iterations=300, max_images=64)
    (found,) = reconstruct(sent.captured, attack(name, **settings), budget=budget, device="cpu")
    assert isinstance(found, Reconstruction), found
    return found


@pytest.mark.parametrize("data", ["breast-cancer", "wine", "diabetes"])
@pytest.mark.parametrize("name", ["analytic", "spear"])
def test_a_closed_form_returns_a_row_and_its_target_exactly(data: str, name: str) -> None:
    sent = send_rows(data, 1, seed=3)
    scored = score_rows(sent, attacked(sent, name))
    assert scored.rows[0].exact and scored.label_accuracy == 1.0


def test_spear_returns_a_batch_of_rows_with_numbers_as_targets() -> None:
    sent = send_rows("diabetes", 4, seed=1)
    found = attacked(sent, "spear")
    scored = score_rows(sent, found)
    assert features_right(scored) == 1.0 and scored.label_accuracy == 1.0
    wanted = sent.truth.labels.sort().values
    assert torch.allclose(found.targets.sort().values, wanted, atol=1e-4)


def test_the_target_of_one_row_is_read_from_the_last_layer() -> None:
    sent = send_rows("diabetes", 1, seed=5)
    case = open_case(sent.captured, tier="oblivious", max_images=8)
    assert isinstance(case, Case)
    assert float(infer_targets(case)[0, 0]) == pytest.approx(float(sent.truth.labels[0]), abs=1e-4)


@pytest.mark.parametrize("epochs", [8, 40])
def test_the_target_is_read_behind_momentum(epochs: int) -> None:
    """The mean step is several times the gradient, unrolled or along the line of many."""
    steps: dict[str, Any] = {
        "algorithm": "fedavg",
        "local_epochs": epochs,
        "lr": 1e-4,
        "momentum": 0.9,
    }
    sent = send_rows("diabetes", 1, seed=5, **steps)
    case = open_case(sent.captured, tier="oblivious", max_images=8)
    assert case.observation.declaration.momentum == 0.9
    assert float(infer_targets(case)[0, 0]) == pytest.approx(float(sent.truth.labels[0]), abs=0.1)


def test_an_ensemble_finds_a_row_and_is_certain_where_it_is_right() -> None:
    sent = send_rows("wine", 1, seed=0)
    found = attacked(sent, "tableak", members=4)
    assert features_right(score_rows(sent, found)) >= 0.9
    certainty = found.pick.certainty
    assert certainty is not None and certainty.shape == (1, len(sent.schema.columns))
    assert float(certainty.min()) >= 0.0 and float(certainty.max()) <= 1.0


def test_reconstructed_rows_are_rows_of_the_schema() -> None:
    sent = send_rows("diabetes", 2, seed=0)
    found = attacked(sent, "tableak", members=2)
    flat = found.images.flatten(1)
    assert torch.allclose(project(sent.schema, flat), flat, atol=1e-6)


@pytest.mark.thorough
def test_local_steps_are_simulated_on_rows() -> None:
    sent = send_rows("wine", 2, seed=2, algorithm="fedavg", batch_size=1, local_epochs=2, lr=0.05)
    assert sent.captured.declaration.local_steps == 4
    found = attacked(sent, "tableak", members=2)
    assert found.settings["forward"]["kind"] == "LocalTraining"
    assert (found.gradient_cosine or 0.0) > 0.9


def test_rows_without_a_schema_are_refused_by_name() -> None:
    sent = send_rows("wine", 1, seed=0)
    bare = replace(sent.captured, declaration=replace(sent.captured.declaration, table=None))
    (found,) = reconstruct(bare, "tableak", device="cpu")
    check_refusal(found, "declaration-lacks", "data.table")


def test_auto_tries_what_handles_rows() -> None:
    sent = send_rows("breast-cancer", 1, seed=0)
    (found,) = reconstruct(sent.captured, "auto", budget=Budget(iterations=20), device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.method in ("analytic", "spear")
    assert score_rows(sent, found).rows[0].exact


def test_groups_are_softmax_of_their_own_logits_alone() -> None:
    groups = Groups(SCHEMA, torch.device("cpu"))
    found = groups.softmax(torch.tensor([[9.0, 1.0, 2.0, 3.0]]))
    expected = torch.tensor([1.0, 2.0, 3.0]).softmax(0)
    assert float(found[0, 0]) == 0.0 and torch.allclose(found[0, 1:], expected)


def test_pooling_pairs_members_takes_medians_and_measures_agreement() -> None:
    a, b = [0.1, 1.0, 0.0, 0.0], [0.9, 0.0, 0.0, 1.0]
    odd = [0.9, 0.0, 1.0, 0.0]
    # Four members, of which the worse half is left out; the second has its rows in another order.
    rows = torch.tensor([[a, b], [b, a], [odd, odd], [odd, odd]])
    labels = torch.tensor([[[1.0, 0], [0, 1.0]], [[0, 1.0], [1.0, 0]]] * 2)
    pool = pooled(SCHEMA, rows, labels, torch.tensor([0.1, 0.2, 5.0, 6.0]))
    assert pool.best == 0 and torch.allclose(pool.rows, torch.tensor([a, b]))
    assert torch.allclose(pool.labels, torch.tensor([[1.0, 0], [0, 1.0]]))
    assert torch.allclose(pool.certainty, torch.ones(2, 2))


def test_members_that_differ_leave_no_certainty() -> None:
    rows = torch.tensor([[[0.1, 1.0, 0, 0]], [[0.9, 0, 1.0, 0]], [[0.5, 0, 0, 1.0]]])
    rows = torch.cat([rows, rows])
    pool = pooled(SCHEMA, rows, torch.zeros(6, 1, 2), torch.tensor([0.1, 0.2, 0.3, 4, 5, 6]))
    assert float(pool.certainty.max()) < 1e-6
