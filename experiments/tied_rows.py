"""Tokens read off a tied embedding's gradient by the sign and size of its rows.

    OMP_NUM_THREADS=1 python -m experiments.tied_rows [--clients 8] [--network new] [--json]

Clients hold made-up clinical notes and train a GPT-2 shape whose output layer shares the embedding:
one gradient of each client's texts, at a new network, or at one that was trained on public notes.
``precision`` and ``recall`` are of the sets of tokens of a client's texts, without padding and
special ones; ``low`` is the least recall of a client. The threshold of sizes was chosen on the
split ``choose``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.tied_rows import (
    SIZE,
    rows_of_other_sign,
    rows_of_other_size,
    tokens_of_tied_rows,
)
from bract.config.text import TextSchema
from bract.data.tokens import ids_of
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.losses import loss_of
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.texts import FIRST_SEED, LENGTH, sentences, tokenizer_named

COLUMNS = ("network", "batch", "by", "clients", "tokens", "precision", "recall", "low")
MODEL = "text-decoder(width=128,depth=2,heads=2)"
BATCHES = (1, 4, 16)
NETWORKS = ("new", "trained")
_STEPS, _PUBLIC_BATCH, _RATE = 100, 16, 1e-3


def main() -> None:
    """Read every client's update; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    arguments.add_argument("--size", type=float, default=SIZE)
    arguments.add_argument("--network", choices=NETWORKS, help="only rows of this one")
    options = parse(arguments)
    rows = [
        note_row(found, COLUMNS)
        for network in NETWORKS
        if options.network in (None, network)
        for batch in BATCHES
        for found in rows_of(network, batch, options.clients, options.split, options.size)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(network: str, batch: int, clients: int, split: str, size: float) -> list[Row]:
    """Return a row for each way of reading, over as many clients."""
    own = tokenizer_named("words")
    schema = TextSchema(
        vocabulary=own.vocabulary,
        length=LENGTH,
        padding=own.padding,
        special=own.special,
        task="language-model",
    )
    dropped = torch.tensor([schema.padding, *schema.special])
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "sign": rows_of_other_sign,
        "size": lambda gradient: rows_of_other_size(gradient, size=size),
        "sign or size": lambda gradient: tokens_of_tied_rows(gradient, size=size),
    }
    scores: dict[str, list[tuple[float, float]]] = {by: [] for by in ways}
    count: list[float] = []
    for seed in range(FIRST_SEED[split], FIRST_SEED[split] + clients):
        texts = random.Random(seed).sample(sentences("notes", split), batch)
        ids = ids_of(own.encode(texts, schema), schema)
        gradient = tied_gradient(network, schema, ids, seed=seed)
        true = set(ids.unique().tolist()) - set(dropped.tolist())
        count.append(len(true))
        for by, read in ways.items():
            found = set(read(gradient).tolist()) - set(dropped.tolist())
            right = len(found & true)
            scores[by].append((right / len(found) if found else 0.0, right / len(true)))
    return [
        {
            "network": network,
            "batch": batch,
            "by": by,
            "clients": clients,
            "tokens": mean(count),
            "precision": mean([one for one, _ in found]),
            "recall": mean([other for _, other in found]),
            "low": min(other for _, other in found),
        }
        for by, found in scores.items()
    ]


def tied_gradient(network: str, schema: TextSchema, ids: Tensor, *, seed: int) -> Tensor:
    """Return the gradient of the shared embedding for texts ``(B, T)``, ``(vocabulary, width)``."""
    model = _network(network, schema, seed)
    model.zero_grad()
    loss_of(schema.objective).mean(model(ids), torch.zeros(len(ids))).backward()
    shared = [p for p in model.parameters() if len(p) == schema.vocabulary]
    assert len(shared) == 1 and shared[0].grad is not None
    return shared[0].grad


@cache
def _network(network: str, schema: TextSchema, seed: int) -> nn.Module:
    model = create_model(
        MODEL, classes=1, channels=LENGTH, image_size=1, activation="", text=schema
    )
    initialise(model, "default", seed)
    model.eval()
    if network == "trained":
        _train(model, schema, seed)
    return model


def _train(model: nn.Module, schema: TextSchema, seed: int) -> None:
    """Train on public notes."""
    public = tokenizer_named("words").encode(sentences("notes", "public"), schema)
    ids, draw = ids_of(public, schema), random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    for _ in range(_STEPS):
        batch = ids[draw.sample(range(len(ids)), _PUBLIC_BATCH)]
        optimizer.zero_grad()
        loss_of(schema.objective).mean(model(batch), torch.zeros(len(batch))).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
