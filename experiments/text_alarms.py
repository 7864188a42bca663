"""How often the leak rule names texts that saw no gradient, and how often recovered ones.

    OMP_NUM_THREADS=1 python -m experiments.text_alarms [--runs 200] [--json]

A run is one client's upload of four texts, beside as many texts that were made without it: the most
frequent token at each position, public texts at random, texts of another client, or the public text
nearest to each of another client's. ``alarms`` is the share of runs in which any text counts as
leaked; the rule promises at most 5 %. ``named`` is the share of texts that leak where all are the
originals, or have that share of their tokens replaced by random ones. The rule's margin was set
beforehand on tables; nothing was chosen here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bract.audit.intervals import share_interval
from bract.config.text import TextSchema
from bract.data.tokens import as_example, ids_of
from bract.inputs import Truth
from bract.inputs.text import KeptTexts
from bract.schema import AuditResult
from bract.schema.audit import ImageResult
from bract.scores.leaks import LeakRule
from bract.scores.text import TextScorer
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.texts import LENGTH, public_texts, sentences, tokenizer_named

COLUMNS = ("data", "made", "runs", "alarms", "low", "high", "named", "undecided")
BATCH = 4
SPOILT = (0.0, 0.1, 0.25, 0.5)


def main() -> None:
    """Judge the runs of both kinds of text; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=200)
    arguments.add_argument("--references", type=int, default=300)
    options = parse(arguments)
    rows = [
        note_row(found, COLUMNS)
        for data in ("notes", "prose")
        for found in rows_of(data, options.runs, options.references)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(data: str, runs: int, count: int) -> list[Row]:
    """Return one row for each way of making texts."""
    tokenizer = tokenizer_named("minilm")
    schema = TextSchema(
        vocabulary=tokenizer.vocabulary,
        length=LENGTH,
        padding=tokenizer.padding,
        special=tokenizer.special,
    )
    whole = public_texts(data, "minilm", schema).candidates[:count]
    public = KeptTexts(whole, torch.zeros(len(whole)), 0, schema)
    scorer = TextScorer(schema, public)
    pool = tokenizer.encode(sentences(data, "score"), schema)
    alarms: dict[str, int] = {}
    named = dict.fromkeys(SPOILT, 0)
    undecided = dict.fromkeys(SPOILT, 0)
    for run in range(runs):
        generator = torch.Generator().manual_seed(run)
        order = torch.randperm(len(pool), generator=generator)[: 2 * BATCH]
        mine, others = pool[order[:BATCH]], pool[order[BATCH:]]
        truth = Truth(mine, torch.zeros(BATCH, dtype=torch.int64))
        made = public.baselines(truth.labels, BATCH, seed=run) | {
            "another client": others,
            "public texts near another client's": whole[
                scorer.distances(whole, others).argmin(dim=0)
            ],
        }
        for name, texts in made.items():
            alarms[name] = alarms.get(name, 0) + any(_judged(scorer, texts, truth)[0])
        for share in SPOILT:
            leaked, decided = _judged(scorer, _spoilt(mine, share, schema, generator), truth)
            named[share] += sum(leaked)
            undecided[share] += len(decided) - sum(decided)
    found: list[Row] = []
    for name, number in alarms.items():
        low, high = share_interval([float(i < number) for i in range(runs)]) or (0.0, 1.0)
        about = {"data": data, "made": name.replace("_", " "), "runs": runs}
        found.append(about | {"alarms": number / runs, "low": low, "high": high})
    for share in SPOILT:
        about = {"data": data, "made": f"originals, {share:.0%} of tokens replaced", "runs": runs}
        judged = runs * BATCH
        found.append(
            about | {"named": named[share] / judged, "undecided": undecided[share] / judged}
        )
    return found


def _spoilt(texts: Tensor, share: float, schema: TextSchema, generator: torch.Generator) -> Tensor:
    """Replace a share of the tokens that are neither padding nor special by random ones."""
    ids = ids_of(texts, schema)
    kept = torch.isin(ids, torch.tensor([schema.padding, *schema.special]))
    other = torch.randint(schema.vocabulary, ids.shape, generator=generator)
    spoil = (torch.rand(ids.shape, generator=generator) < share) & ~kept
    return as_example(torch.where(spoil, other, ids), schema)


def _judged(scorer: TextScorer, made: Tensor, truth: Truth) -> tuple[list[bool], list[bool]]:
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
        round=1, client="c", attack="none", input="text", images=images, scored=len(images)
    )
    (decisions,) = LeakRule().decide([audit])
    return [d.reason is not None for d in decisions], [d.decided for d in decisions]


if __name__ == "__main__":
    main()
