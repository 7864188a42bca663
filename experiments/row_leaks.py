"""How often the leak rule names rows that saw no gradient, and how often exact ones.

    OMP_NUM_THREADS=1 python -m experiments.row_leaks [--runs 200] [--json]

A run is one client's batch of eight rows, beside as many rows that were made without its upload:
mode and mean of the class, random rows of the test split or of the true label in it, or rows of
another client. The rule's margin was set beforehand; the rule was tried on breast cancer and
affairs (``fair``), the other sets chose nothing. ``alarms`` is the share of runs in which any row
counts as leaked; the rule promises at most 5 %. ``named`` is the share of rows that leak where all
are exact copies, and ``undecided`` that of rows of which it cannot be decided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bract.audit.intervals import share_interval
from bract.data.sources import open_source
from bract.data.views import data_spec
from bract.inputs import References, Truth
from bract.schema import AuditResult
from bract.schema.audit import ImageResult
from bract.scores.leaks import LeakRule
from bract.scores.table import RowScorer
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.rows import config_of, references_of

COLUMNS = ("data", "chose", "made", "runs", "alarms", "low", "high", "named", "undecided")
CHOSE = ("breast-cancer", "fair")
OTHERS = ("wine", "diabetes", "anes96", "modechoice")
BATCH = 8


def main() -> None:
    """Judge every set's runs; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=200)
    options = parse(arguments)
    rows = [
        note_row(found, COLUMNS)
        for data in (*CHOSE, *OTHERS)
        for found in rows_of(data, options.runs)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(data: str, runs: int) -> list[Row]:
    """Return one row for each way of making rows, and one for exact copies."""
    spec, references = data_spec(config_of(data)), references_of(data)
    assert spec.table is not None
    source = open_source(config_of(data), "train")
    scorer = RowScorer(spec.table, references)
    alarms: dict[str, int] = {}
    named, undecided, rows = 0, 0, 0
    for run in range(runs):
        generator = torch.Generator().manual_seed(run)
        order = torch.randperm(len(source.labels), generator=generator).tolist()
        mine, others = order[:BATCH], order[BATCH : 2 * BATCH]
        truth = Truth(source.images(mine, channels=0, size=0), source.labels[mine])
        pool = source.images(others, channels=0, size=0)
        for name, made in _made(references, truth, pool, run).items():
            alarms[name] = alarms.get(name, 0) + any(_judged(scorer, made, truth)[0])
        leaked, decided = _judged(scorer, truth.images, truth)
        named += sum(leaked)
        undecided += len(decided) - sum(decided)
        rows += len(leaked)
    found: list[Row] = []
    for name, count in alarms.items():
        low, high = share_interval([float(i < count) for i in range(runs)]) or (0.0, 1.0)
        about = {"data": data, "chose": data in CHOSE, "made": name, "runs": runs}
        found.append(about | {"alarms": count / runs, "low": low, "high": high})
    exact = {"data": data, "chose": data in CHOSE, "made": "exact copies", "runs": runs}
    return [*found, exact | {"named": named / rows, "undecided": undecided / rows}]


def _made(references: References, truth: Truth, pool: Tensor, seed: int) -> dict[str, Tensor]:
    made = references.baselines(truth.labels, BATCH, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    of_class = [
        rows[int(torch.randint(len(rows), (1,), generator=generator))]
        for label in truth.labels
        if len(rows := references.of_class(int(label)))
    ]
    found = made | {"another_client": pool[:BATCH]}
    return found | ({"random_of_class": torch.stack(of_class)} if len(of_class) == BATCH else {})


def _judged(scorer: RowScorer, made: Tensor, truth: Truth) -> tuple[list[bool], list[bool]]:
    scored = scorer.score(made, truth)
    baselines = scorer.baselines({}, scored, truth, len(made))
    retrieved = scorer.retrieval(made, scored, truth)
    images = [
        ImageResult(
            index=i,
            scores=row,
            retrieval=retrieved[i],
            baselines={name: rows[i] for name, rows in baselines.items()},
        )
        for i, row in enumerate(scored.rows)
    ]
    audit = AuditResult(
        round=1, client="c", attack="none", input="table", images=images, scored=len(images)
    )
    (decisions,) = LeakRule().decide([audit])
    return [d.reason is not None for d in decisions], [d.decided for d in decisions]


if __name__ == "__main__":
    main()
