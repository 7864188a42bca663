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

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from bract.attacks.methods.token_span.token_span import TokenSpan
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.text_readings import MADE_BY, read_texts, scores_of
from experiments.harness.texts import FIRST_SEED, SentTexts, public_texts, send_texts

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
    done = Finished(options.resume, "experiments.text_noise", *MADE_BY)
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

    def send(seed: int) -> SentTexts:
        return send_texts(
            "notes",
            setting.batch,
            seed=seed,
            model=setting.model,
            tokenizer="words",
            split=split,
            defense=setting.defense or None,
            **setting.training,
        )

    first = FIRST_SEED[split]
    readings = read_texts(
        range(first, first + clients),
        send,
        TokenSpan(seconds=seconds, relax=setting.relax),
        texts=setting.batch,
        seconds=None,
        tier="adaptive" if setting.defense else "oblivious",
        references=partial(public_texts, "notes", "words"),
    )
    return {**asdict(setting), "seconds": seconds, **scores_of(readings)}


if __name__ == "__main__":
    main()
