"""Tags of tokens, recovered with the tokens from one client's upload, by model, batch and defense.

    OMP_NUM_THREADS=1 python -m experiments.text_tags [--clients 4] [--resume FILE] [--json]

Each client trains a model of its own seed on made-up notes of at most 32 tokens, one gradient of
all of them, with the tags of the notes: names, places, dates, numbers and other words. `token-span`
reads tokens and tags; the attacker knows the defense. ``recall`` is the share of a text's tokens
that were recovered, ``exact`` that of texts without any error, ``tags`` the share of tags that are
right at their tokens' places, ``marked`` that of the tags other than ``other``, and ``frequent``
the share that a guess without the upload has, which calls every token ``other``. Texts of a refused
upload count as nothing recovered. Nothing was chosen on these texts or networks. Seconds are the
process' own, on one thread, an upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Reconstruction
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.data.notes import TAGS
from bract.data.tokens import ids_of
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.text_readings import MADE_BY, read_texts, scores_of
from experiments.harness.texts import FIRST_SEED, SentTexts, send_texts

COLUMNS = (
    *("model", "batch", "about", "clients", "refused", "recall", "exact", "tags", "marked"),
    *("frequent", "cpu_seconds"),
)
MODELS = (
    "text-encoder(width=128,depth=2,heads=2)",
    "text-decoder(width=128,depth=2,heads=2)",
    "text-decoder(width=256,depth=2,heads=4)",
)
DEFENSES: dict[str, dict[str, Any]] = {"undefended": {}, "adadefense": {"name": "adadefense"}}


@dataclass(frozen=True)
class Setting:
    """One row."""

    model: str
    batch: int
    about: str = "undefended"
    defense: dict[str, Any] = field(default_factory=dict)


def standard_plan() -> Iterator[Setting]:
    """Every combination, the cheap ones first."""
    for about, defense in DEFENSES.items():
        for batch in (1, 4):
            for model in MODELS:
                yield Setting(model, batch, about, defense)


def main() -> None:
    """Attack every setting's clients; then print the table or JSON."""
    arguments = parser(__doc__, "resume")
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    arguments.add_argument("--seconds", type=float, default=60.0, help="of an attack")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.text_tags", *MADE_BY)
    rows: list[Row] = []
    for setting in standard_plan():
        about = asdict(setting) | {"clients": options.clients, "split": options.split}
        row = done.get(about)
        if row is None:
            made = row_of(setting, options.clients, options.split, options.seconds)
            row = done.add(about, made)
        rows.append(note_row(row, COLUMNS))
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
            task="token-classification",
            defense=setting.defense or None,
        )

    first = FIRST_SEED[split]
    readings = read_texts(
        range(first, first + clients),
        send,
        TokenSpan(seconds=seconds),
        texts=setting.batch,
        seconds=None,
        tier="adaptive" if setting.defense else "oblivious",
    )
    tags: list[float] = []
    marked: list[float] = []
    frequent: list[float] = []
    for one in readings:
        labels = one.sent.truth.labels
        frequent += _shares(one.sent, torch.zeros_like(labels))[0]
        nothing = torch.full_like(labels, -1)
        own = _shares(one.sent, nothing if one.found is None else _read(one.found, one.sent))
        tags += own[0]
        marked += own[1]
    return {
        **asdict(setting),
        "seconds": seconds,
        **scores_of(readings),
        "tags": mean(tags),
        "marked": mean(marked),
        "frequent": mean(frequent),
    }


def _read(found: Reconstruction, sent: SentTexts) -> Tensor:
    """Return tags ``(B, T)`` in the order of the originals, -1 where none was read.

    A tag counts at its token's place: where another token was read there is none. Each original
    takes the nearest text that is left.
    """
    ids, own = ids_of(found.images, sent.schema), ids_of(sent.truth.images, sent.schema)
    rows = found.label_probabilities.unflatten(1, (sent.schema.length, sent.schema.tags))
    named = torch.where(rows.sum(dim=2) > 0, rows.argmax(dim=2), -1)
    same = (ids[None] == own[:, None]) & (own != sent.schema.padding)[:, None]
    near = same.sum(dim=2)
    result = torch.full_like(sent.truth.labels, -1)
    for _ in range(len(own)):
        place = int(near.argmax())
        text, taken = divmod(place, near.shape[1])
        result[text] = torch.where(same[text, taken], named[taken], -1)
        near[text], near[:, taken] = -1, -1
    return result


def _shares(sent: SentTexts, found: Tensor) -> tuple[list[float], list[float]]:
    """Return the share of right tags of each text, and of those that are not ``other``."""
    labels = sent.truth.labels
    right = found == labels
    every = [float(r[own >= 0].float().mean()) for r, own in zip(right, labels, strict=True)]
    other = TAGS.index("other")
    marked = [
        float(r[own > other].float().mean())
        for r, own in zip(right, labels, strict=True)
        if bool((own > other).any())
    ]
    return every, marked


if __name__ == "__main__":
    main()
