"""An encoder's texts by `token-span` where noise or rounding breaks the exact check.

    OMP_NUM_THREADS=1 python -m experiments.text_noise [--clients 2] [--resume FILE] [--json]

Each client sends one gradient of four made-up notes from a network of its own; the attacker knows
the size of the noise. Each upload is attacked twice: with the descent on mixtures of tokens
(objective of TIGER, 2606.18312), and by the subspace check on single tokens alone. ``recall`` is
the share of a text's tokens that were recovered, ``exact`` that of texts without any error.
Texts of a refused upload count as nothing recovered. Settings were chosen on the split ``choose``.
Seconds are the process' own, on one thread, an upload.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.audit.questions.reconstruction.scores.text import TextScorer
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.texts import FIRST_SEED, public_texts, send_texts

COLUMNS = ("about", "relax", "clients", "refused", "recall", "exact", "nearest_public")
ENCODER = "text-encoder(width=256,depth=2,heads=4)"
BATCH = 4


@dataclass(frozen=True)
class Setting:
    """One row; ``training`` are keys of the configuration."""

    about: str
    relax: bool
    model: str = ENCODER
    batch: int = BATCH
    defense: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def standard_plan() -> Iterator[Setting]:
    """Noise of a few sizes and bfloat16, with and without the descent."""
    for relax in (False, True):
        yield Setting("no noise", relax)
        yield Setting("bfloat16", relax, training={"update_dtype": "bfloat16"})
        for std in (1e-6, 1e-5, 1e-4):
            noise = {"name": "noise", "std": std, "clip": 1.0}
            yield Setting(f"clipping to 1, noise {std:.0e}", relax, defense=noise)


def main() -> None:
    """Attack every setting's clients; then print the table or JSON."""
    arguments = parser(__doc__, "resume")
    arguments.add_argument("--clients", type=int, default=2)
    arguments.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    arguments.add_argument("--seconds", type=float, default=40.0, help="of an attack")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.text_noise")
    rows = [
        note_row(
            done.row(
                asdict(setting) | {"clients": options.clients, "split": options.split},
                lambda s=setting: row_of(s, options.clients, options.split, options.seconds),  # type: ignore[misc]
            ),
            COLUMNS,
        )
        for setting in standard_plan()
    ]
    emit(rows, COLUMNS, as_json=options.json)


def row_of(setting: Setting, clients: int, split: str, seconds: float) -> Row:
    """Attack as many clients as asked for."""
    recall, nearest = list[float](), list[float]()
    exact, refused, spent = 0, 0, 0.0
    for seed in range(FIRST_SEED[split], FIRST_SEED[split] + clients):
        sent = send_texts(
            "notes",
            setting.batch,
            seed=seed,
            model=setting.model,
            tokenizer="words",
            split=split,
            defense=setting.defense or None,
            **setting.training,
        )
        begun = time.process_time()
        (found,) = reconstruct(
            sent.captured,
            TokenSpan(seconds=seconds, relax=setting.relax),
            budget=Budget(max_images=setting.batch),
            seed=seed,
            tier="adaptive" if setting.defense else "oblivious",
            device="cpu",
        )
        spent += time.process_time() - begun
        if not isinstance(found, Reconstruction):
            refused += 1
            note(found.reason)
            recall += [0.0] * setting.batch
            continue
        scorer = TextScorer(sent.schema, public_texts("notes", "words", sent.schema))
        scored = scorer.score(found.images, sent.truth)
        recall += [one.features or 0.0 for one in scored.rows]
        exact += sum(bool(one.exact) for one in scored.rows)
        made = scorer.baselines({}, scored, sent.truth, setting.batch)
        nearest += [one.features or 0.0 for one in made["nearest_public_row"]]
    return {
        **asdict(setting),
        "clients": clients,
        "seconds": seconds,
        "refused": refused,
        "recall": mean(recall),
        "recall_least": min(recall),
        "exact": exact / (clients * setting.batch),
        "nearest_public": mean(nearest) if nearest else None,
        "cpu_seconds": spent / clients,
    }


if __name__ == "__main__":
    main()
