import pytest
import torch
from torch import Tensor

from bract.config.table import Column, TableSchema, Target
from bract.data.rows import encode
from bract.inputs import Truth
from bract.schema import AuditResult
from bract.schema.audit import Baseline, CellResult, ImageResult, Retrieval, Scores
from bract.scores import LeakRule
from bract.scores.table import RowScorer, distances, matches
from experiments.harness.rows import references_of, send_rows

SCHEMA = TableSchema(
    (
        Column("age", "integer", low=0.0, high=100.0, mean=50.0, std=20.0),
        Column("dose", low=0.0, high=1.0, std=0.1, missing=True),
        Column("ward", "categorical", categories=("a", "b")),
    ),
    Target("y", ("no", "yes")),
)


def rows(*values: tuple[object, object, object]) -> Tensor:
    table = {name: [v[i] for v in values] for i, name in enumerate(SCHEMA.names)}
    return encode(SCHEMA, table, source="test")[:, :, None, None]


ORIGINALS = rows((50, 0.5, "a"), (20, None, "b"))


def test_features_are_right_within_the_tolerance_or_where_equal() -> None:
    found = rows((52, 0.52, "a"), (20, 0.0, "b"))
    right = matches(SCHEMA, found, ORIGINALS)
    # 52 is 2 = 20 / 10 away, 0.52 is 0.02 > 0.1 / 10 away; a missing value is no number.
    assert right[0, 0].tolist() == [True, False, True]
    assert right[1, 1].tolist() == [True, False, True]


def test_distances_count_categories_and_standard_deviations() -> None:
    apart = distances(SCHEMA, rows((80, 0.5, "b")), ORIGINALS[:1])
    # 30 of 3 * 20 years, no dose, another ward.
    assert float(apart) == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_rows_are_paired_so_that_most_features_are_right() -> None:
    scored = RowScorer(SCHEMA, None).score(
        ORIGINALS.flip(0), Truth(ORIGINALS, torch.tensor([0, 1]))
    )
    assert scored.order.tolist() == [1, 0]
    assert all(row.exact and row.features == 1.0 for row in scored.rows)


def test_fewer_rows_than_originals_keep_the_original_each_explains() -> None:
    scored = RowScorer(SCHEMA, None).score(ORIGINALS[1:], Truth(ORIGINALS, torch.tensor([0, 1])))
    assert scored.labels == [1] and scored.rows[0].exact and not scored.identified


def test_targets_are_compared_in_the_pairs() -> None:
    truth = Truth(ORIGINALS, torch.tensor([0, 1]))
    scored = RowScorer(SCHEMA, None).score(ORIGINALS.flip(0), truth, recovered=torch.tensor([1, 1]))
    assert scored.label_accuracy == 0.5


def test_cells_name_columns_values_and_whether_they_are_right() -> None:
    cells = RowScorer(SCHEMA, None).cells(
        ORIGINALS[1], 1.0, torch.tensor([1.0, 0.5, 0.0]), ORIGINALS[0], 0.0
    )
    assert [(c.column, c.value, c.original, c.right) for c in cells] == [
        ("age", "20", "50", False),
        ("dose", None, "0.5", False),
        ("ward", "b", "a", False),
        ("y", "yes", "no", False),
    ]
    assert [c.certainty for c in cells] == [1.0, 0.5, 0.0, None]


def test_a_calibration_counts_right_cells_by_certainty() -> None:
    cells = [
        CellResult(certainty=c, right=r) for c, r in ((0.95, True), (1.0, False), (0.1, False))
    ]
    found = RowScorer(SCHEMA, None).calibration([cells])
    assert [(b.low, b.cells, b.right) for b in found] == [(0.0, 1, 0), (0.8, 2, 1)]


def test_an_exact_row_stands_out_and_a_random_one_does_not() -> None:
    sent = send_rows("breast-cancer", 4, seed=0)
    references = references_of("breast-cancer")
    scorer = RowScorer(sent.schema, references)
    for found, stands_out in (
        (sent.truth.images, True),
        (references.baselines(sent.truth.labels, 4, seed=0)["random_row"], False),
    ):
        scored = scorer.score(found, sent.truth)
        retrieved = scorer.retrieval(found, scored, sent.truth)
        assert all(r is not None and r.chance is not None for r in retrieved)
        chances = [r.chance for r in retrieved if r is not None and r.chance is not None]
        assert (max(chances) < 1e-4) if stands_out else (min(chances) > 0.01)


def test_baselines_hold_mode_mean_a_random_row_and_the_nearest_public_row() -> None:
    sent = send_rows("wine", 3, seed=0)
    references = references_of("wine")
    scorer = RowScorer(sent.schema, references)
    scored = scorer.score(sent.truth.images, sent.truth)
    made = references.baselines(sent.truth.labels, 3, seed=0)
    found = scorer.baselines(made, scored, sent.truth, 3)
    assert set(found) == {"mode_and_mean", "random_row", "nearest_public_row"}
    nearest, others = (found[n] for n in ("nearest_public_row", "random_row"))
    assert all((a.features or 0) >= (b.features or 0) for a, b in zip(nearest, others, strict=True))


@pytest.mark.parametrize(
    ("features", "baseline", "chance", "leaked"),
    [
        (1.0, 0.95, 1e-6, True),
        (0.8, 0.5, 1e-6, True),
        (0.6, 0.5, 1e-6, False),
        (1.0, 0.5, 0.5, False),
    ],
)
def test_a_row_leaks_where_chance_and_the_nearest_public_row_do_not_explain_it(
    features: float, baseline: float, chance: float, leaked: bool
) -> None:
    image = ImageResult(
        index=0,
        scores=Scores(features=features),
        baselines={"nearest_public_row": Baseline(features=baseline)},
        retrieval=Retrieval(chance=chance, least=1e-9, nearest=True, references=99, choices=1),
    )
    audit = AuditResult(
        round=1, client="c", attack="spear", input="table", images=[image], scored=1
    )
    (decision,) = LeakRule().decide([audit])[0]
    assert (decision.reason == "features") == leaked
