"""Texts reconstructed from one client's upload by `token-span`, by model, batch and defense.

    OMP_NUM_THREADS=1 python -m experiments.text_leaks [--clients 3] [--resume FILE] [--json]

Each client trains a model of its own seed (MiniLM's weights are the same for all) on texts of at
most 32 tokens with labels drawn at random: made-up clinical notes, or sentences of Python's
language reference. ``recall`` is the share of a text's tokens that were recovered, ``exact`` that
of texts without any error, ``rare`` the share of tokens in fewer than one public text of a hundred
(names and numbers), ``nearest_public`` the recall of the nearest of two thousand public texts.
Texts of a refused upload count as nothing recovered. The attacker knows the defense where the tier
is adaptive. Of the panel ``adapters`` the rounds up to ``round`` are joined; ``dimensions`` are
those that the joined gradients of the first adapters span, ``inputs`` the distinct tokens at
positions of the update: means over clients. ``present`` is the share of the update's distinct
tokens that are in any returned text. No text and no network chose a setting: those were chosen on
the split ``choose``. Seconds are the process' own, on one thread, an upload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from bract.attacks.methods.token_span.stages import find_stages
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.attacks.reading.span import span_of_rounds
from bract.data.tokens import ids_of
from bract.models import create_model
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.text_readings import MADE_BY, read_texts, scores_of
from experiments.harness.texts import FIRST_SEED, SentTexts, public_texts, send_texts

COLUMNS = (
    *("panel", "data", "model", "batch", "about", "tier", "clients", "refused", "recall"),
    *("exact", "precision", "rouge_1", "rouge_2", "rouge_l", "rare", "nearest_public"),
    *("present", "round", "dimensions", "inputs", "cpu_seconds"),
)
MINILM = "text-encoder(weights=minilm)"
MINILM_LORA = "text-encoder(weights=minilm,lora=8)"
GPT2 = "text-decoder(width=768,depth=4,heads=12)"
SMALL = "text-decoder(width=256,depth=4,heads=4)"
SMALL_LORA = "text-decoder(width=256,depth=4,heads=4,lora=8)"

_PROBE = 12


@dataclass(frozen=True)
class Setting:
    """One row; ``training`` are keys of the configuration."""

    panel: Literal["models", "defenses", "training", "tied", "adapters"]
    model: str
    batch: int
    data: str = "notes"
    about: str = "one gradient"
    tokenizer: str = "minilm"
    task: str = "classification"
    round: int = 1
    defense: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def tier(self) -> Literal["oblivious", "adaptive"]:
        """Return what the attacker knows."""
        return "adaptive" if self.defense else "oblivious"


DEFENSES: dict[str, dict[str, Any]] = {
    "undefended": {},
    "adadefense": {"name": "adadefense"},
    "guardian": {"name": "guardian"},
    "pruning 50 %": {"name": "pruning", "ratio": 0.5},
    "pruning 90 %": {"name": "pruning", "ratio": 0.9},
    "clipping to 1, noise 1e-7": {"name": "noise", "std": 1e-7, "clip": 1.0},
    "clipping to 1, noise 1e-6": {"name": "noise", "std": 1e-6, "clip": 1.0},
    "clipping to 1, noise 1e-5": {"name": "noise", "std": 1e-5, "clip": 1.0},
    "clipping to 1, noise 1e-4": {"name": "noise", "std": 1e-4, "clip": 1.0},
    "clipping to 1, noise 1e-3": {"name": "noise", "std": 1e-3, "clip": 1.0},
    "clipping to 1, noise 1e-2": {"name": "noise", "std": 1e-2, "clip": 1.0},
    "clipping to 1, noise 1e-1": {"name": "noise", "std": 1e-1, "clip": 1.0},
    "clipping to 1, noise 1": {"name": "noise", "std": 1.0, "clip": 1.0},
}


def standard_plan() -> Iterator[Setting]:
    """Every combination that the documentation speaks of, the cheap ones first."""
    for name, defense in DEFENSES.items():
        for batch in (1, 4, 16) if name == "undefended" else (1, 4):
            yield Setting("defenses", SMALL, batch, about=name, tokenizer="words", defense=defense)
    for steps, size in ((1, 4), (4, 4), (4, 1)):
        work = {"algorithm": "fedavg", "local_steps": steps, "batch_size": size, "lr": 0.01}
        about = f"FedAvg, {steps} steps of {size}"
        yield Setting("training", SMALL, 4, about=about, tokenizer="words", training=work)
    for data in ("notes", "prose"):
        for batch in (1, 4, 16):
            yield Setting("models", MINILM, batch, data)
            yield Setting("models", MINILM_LORA, batch, data, "second round", round=2)
            if data == "notes":
                yield Setting("models", SMALL_LORA, batch, data, "second round", "words", round=2)
    for last in (2, 3, 5, 9, 17):
        about = "second round" if last == 2 else f"rounds 2 to {last}"
        yield Setting("adapters", SMALL_LORA, 4, about=about, tokenizer="words", round=last)
        yield Setting("adapters", MINILM_LORA, 4, about=about, round=last)
    for batch in (1, 4, 16):
        yield Setting("models", GPT2, batch)
    for batch in (4, 16):
        yield Setting("tied", SMALL, batch, tokenizer="words", task="language-model")


def main() -> None:
    """Attack every setting's clients; then print the table or JSON."""
    arguments = parser(__doc__, "resume")
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    arguments.add_argument("--first", type=int, help="seed of the first client, else the split's")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of an attack")
    arguments.add_argument("--model", help="only rows whose model's name holds this")
    arguments.add_argument("--panel", help="only rows of this panel")
    arguments.add_argument("--data", help="only rows of this data")
    arguments.add_argument("--batch", type=int, help="only rows of so many texts")
    arguments.add_argument("--tier", choices=("oblivious", "adaptive"), help="only rows of it")
    arguments.add_argument("--about", help="only rows whose training or defense holds this")
    arguments.add_argument(
        "--finished",
        action="store_true",
        help="only what --resume holds, measured by older code too",
    )
    options = parse(arguments)
    first = FIRST_SEED[options.split] if options.first is None else options.first
    done = Finished(options.resume, "experiments.text_leaks", *MADE_BY, keep_older=options.finished)
    rows: list[Row] = []
    for setting in standard_plan():
        wanted = (options.model or "") in setting.model and (options.about or "") in setting.about
        given = (options.panel, options.data, options.batch, options.tier)
        own = (setting.panel, setting.data, setting.batch, setting.tier)
        if not wanted or any(g not in (None, o) for g, o in zip(given, own, strict=True)):
            continue
        about = asdict(setting) | {"clients": options.clients, "first": first}
        row = done.get(about)
        if row is None and not options.finished:
            made = row_of(setting, options.clients, options.split, first, options.seconds)
            row = done.add(about, made)
        if row is not None:
            rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row_of(setting: Setting, clients: int, split: str, first: int, seconds: float) -> Row:
    """Attack as many clients as asked for, from the seed ``first`` on."""

    def send(seed: int) -> SentTexts:
        return send_texts(
            setting.data,
            setting.batch,
            seed=seed,
            model=setting.model,
            tokenizer=setting.tokenizer,
            split=split,
            task=setting.task,
            round=setting.round,
            defense=setting.defense or None,
            **setting.training,
        )

    readings = read_texts(
        range(first, first + clients),
        send,
        TokenSpan(seconds=seconds),
        texts=setting.batch,
        seconds=seconds,
        tier=setting.tier,
        references=partial(public_texts, setting.data, setting.tokenizer),
    )
    bounds = [bound_of(one.sent) for one in readings if setting.panel == "adapters"]
    return {
        **asdict(setting),
        "tier": setting.tier,
        "first": first,
        "seconds": seconds,
        **scores_of(readings),
        "dimensions": mean([float(found) for found, _ in bounds]),
        "inputs": mean([float(wanted) for _, wanted in bounds]),
    }


def bound_of(sent: SentTexts) -> tuple[int, int]:
    """Return the dimensions of the first adapters' joined gradients, and the distinct inputs.

    With fewer dimensions than inputs the subspace holds no input whole.
    """
    schema, declared = sent.schema, sent.captured.declaration
    assert declared.model is not None and declared.classes is not None
    network = create_model(
        declared.model, classes=declared.classes, channels=schema.length, image_size=1, text=schema
    ).eval()
    names = list(sent.captured.parameters)
    layers = find_stages(network, names, vocabulary=schema.vocabulary, length=_PROBE).local
    gradients = [one.gradient() for one in (*sent.history, sent.captured)]
    rows = [layer.rows(own) for layer in layers for own in gradients]
    span = span_of_rounds([one / one.norm().clamp_min(1e-30) for one in rows])
    ids = ids_of(sent.truth.images, schema)
    inputs = {(t, at) for row in ids.tolist() for at, t in enumerate(row) if t != schema.padding}
    return span.rank, len(inputs)


if __name__ == "__main__":
    main()
