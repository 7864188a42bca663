"""DAGER's own code beside `token-span` and `auto`, on identical gradients of texts.

    git clone https://github.com/insait-institute/dager-gradient-inversion FOLDER   # at 4383e25
    OMP_NUM_THREADS=1 python -m experiments.dager_peer --code FOLDER [--resume FILE] [--json]

Each client holds made-up film reviews of 9 to 20 tokens and trains a decoder of GPT-2's smallest
shape with weights of its own seed, or MiniLM's encoder. GPT-2's published weights are not here.

DAGER's span checks and its filters of sequences run unchanged. The loop over positions of its
``attack.py``, which needs data sets and a device, is restated in `experiments.harness.dager`.
``settings`` are its *scripts'* (``gpt2.sh``, ``bert.sh``), or those *chosen* among its scripts',
its README's and others by texts of the split ``choose``: its README asks to tweak the tolerance of
ranks. No scored text chose a setting. Where an encoder's tokens have too many orders to try all,
DAGER draws ten million for each length of a text. Here the lengths share ``--seconds`` of the
process, and its filter ends when they are over; ``orders`` are those that it tried, an upload.

Scores are means over texts; a refused upload counts as nothing recovered. Intervals are of 95 %
over clients: of shares those of `share_interval`, of seconds Student's t. ``over_dager`` is the
mean difference of a client's ``rouge_1`` from that of DAGER's better settings on the same uploads,
with Student's t, or where all clients differ alike `share_interval` on half of one plus the
difference. Seconds are the process' own, on one thread, an upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.audit.intervals import mean_interval, share_interval
from bract.scores.text import TextScorer
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.dager import Options, Published
from experiments.harness.result import Row, own
from experiments.harness.scores import mean
from experiments.harness.texts import FIRST_SEED, SentTexts, public_texts, send_texts
from experiments.text_leaks import MINILM

COLUMNS = (
    *("tool", "attack", "settings", "model", "data", "batch", "clients", "refused", "recall"),
    *("exact", "exact_low", "exact_high", "rouge_1", "rouge_1_low", "rouge_1_high", "rouge_2"),
    *("over_dager", "over_dager_low", "over_dager_high", "orders", "cpu_seconds"),
)
GPT2 = "text-decoder(width=768,depth=12,heads=12)"
"""GPT-2's smallest shape."""

BATCHES = (1, 2, 4, 8, 16)
PLAN = tuple((model, "reviews", batch) for model in (GPT2, MINILM) for batch in BATCHES)
SHARES = ("recall", "exact", "precision", "rouge_1", "rouge_2", "rouge_l")

Rebuild = Callable[[SentTexts, int], tuple[Tensor | None, int]]
"""Return the texts of an upload, as an input alike, or None where it is refused; and how many
orders of tokens were tried, 0 where that is not counted."""


@dataclass(frozen=True)
class Tool:
    """An attack and how it is set.

    Attributes
    ----------
    settings
        Of DAGER: ``scripts`` or ``chosen``.
    rank_tol, l1_span_thresh
        DAGER's tolerance of ranks, None its default, and threshold of tokens.
    """

    tool: str
    attack: str
    settings: str | None = None
    rank_tol: float | None = None
    l1_span_thresh: float | None = None


SCRIPTS = Tool("DAGER", "DAGER", "scripts", None, 1e-5)
CHOSEN = {
    "decoder": Tool("DAGER", "DAGER", "chosen", 1e-6, 1e-5),
    "encoder": Tool("DAGER", "DAGER", "chosen", 1e-9, 1e-4),
}

OURS = (Tool("bract", "token-span"), Tool("bract", "auto"))
EVERY = (1, 4)
"""Sizes of batches at which every tool runs."""


def main() -> None:
    """Attack every upload by each tool; print the table or JSON."""
    made = parser(__doc__, "resume")
    made.add_argument("--code", type=Path, required=True, help="folder of DAGER's repository")
    made.add_argument("--clients", type=int, default=6)
    made.add_argument(
        "--seconds", type=float, default=90.0, help="of this project, and of DAGER's encoder filter"
    )
    made.add_argument("--model", default="", help="only rows whose model's name holds this")
    made.add_argument("--batch", type=int, help="only rows of so many texts")
    made.add_argument("--tool", default="", help="only rows of this tool")
    made.add_argument("--split", default="score", choices=tuple(FIRST_SEED))
    made.add_argument("--finished", action="store_true", help="only what --resume holds")
    options = parse(made)
    published = Published(options.code)
    modules = own("dager_peer", "harness.dager", "harness.texts")
    done = Finished(options.resume, *modules, keep_older=options.finished)
    rows: list[Row] = []
    for model, data, batch in PLAN:
        if options.model not in model or options.batch not in (None, batch):
            continue
        tools = [one for one in tools_of(model, batch) if options.tool in one.tool]
        place: Row = {"model": model, "data": data, "batch": batch, "seconds": options.seconds}
        found: dict[Tool, list[Row]] = {tool: [] for tool in tools}
        first = FIRST_SEED[options.split]
        for seed in range(first, first + options.clients):
            send = cache(
                partial(send_texts, data, batch, seed=seed, model=model, split=options.split)
            )
            for tool, clients in found.items():
                what = {**asdict(tool), **place, "seed": seed}
                client = done.get(what)
                if client is None and not options.finished:
                    rebuild = rebuild_by(tool, published, options.seconds)
                    client = done.add(what, client_of(send(), seed, rebuild, data))
                    note(f"{what}: {client}")
                if client is not None:
                    clients.append(client)
        here = [{**asdict(tool), **place, **row_of(each)} for tool, each in found.items() if each]
        rows += [note_row(row, COLUMNS) for row in compared(here)]
    emit(rows, COLUMNS, as_json=options.json)


def tools_of(model: str, batch: int) -> list[Tool]:
    """Return what attacks a row's uploads: DAGER, and this project's attacks.

    Sizes other than `EVERY` leave out DAGER's scripts' settings, and `auto`.
    """
    chosen = next(tool for kind, tool in CHOSEN.items() if kind in model)
    return [SCRIPTS, chosen, *OURS] if batch in EVERY else [chosen, OURS[0]]


def rebuild_by(tool: Tool, published: Published, seconds: float) -> Rebuild:
    """Return a tool's way from an upload to its texts."""
    if tool.l1_span_thresh is None:
        return by_bract(tool.attack, seconds)
    tolerance, threshold = tool.rank_tol, tool.l1_span_thresh
    return lambda sent, seed: published.rebuild(
        sent, seed, tolerance, Options(len(sent.truth.labels), threshold, seconds)
    )


def by_bract(name: str, seconds: float) -> Rebuild:
    """Return an attack of this project with its own settings."""
    attack = TokenSpan(seconds=seconds) if name == TokenSpan.name else name

    def rebuild(sent: SentTexts, seed: int) -> tuple[Tensor | None, int]:
        budget = Budget(max_images=len(sent.truth.labels), seconds=seconds)
        (found,) = reconstruct(sent.captured, attack, budget=budget, seed=seed, device="cpu")
        if isinstance(found, Reconstruction):
            return found.images, 0
        note(found.reason)
        return None, 0

    return rebuild


def client_of(sent: SentTexts, seed: int, rebuild: Rebuild, data: str) -> Row:
    """Attack one client, and score its texts."""
    begun = time.process_time()
    found, tried = rebuild(sent, seed)
    spent = time.process_time() - begun
    scores = scores_of(sent, found, data)
    return {"refused": found is None, "orders": tried, "cpu_seconds": spent, **scores}


def row_of(clients: Sequence[Row]) -> Row:
    """Return one row of several clients: means, their intervals, and the clients' own values."""
    row: Row = {
        "clients": len(clients),
        "refused": sum(one["refused"] for one in clients),
        "orders": mean([float(one["orders"]) for one in clients]),
    }
    for name in (*SHARES, "cpu_seconds"):
        values = [float(one[name]) for one in clients]
        spread = mean_interval if name == "cpu_seconds" else share_interval
        row |= {name: mean(values), f"{name}_each": values, **_ends(name, spread(values))}
    return row


def scores_of(sent: SentTexts, found: Tensor | None, data: str) -> dict[str, float]:
    """Return the means of a client's texts; none recovered of a refused upload."""
    if found is None:
        return dict.fromkeys(SHARES, 0.0)
    scorer = TextScorer(sent.schema, public_texts(data, "minilm", sent.schema))
    texts = scorer.score(found, sent.truth).rows
    values = [
        (
            *(one.features or 0.0, float(bool(one.exact)), one.precision or 0.0),
            *(one.rouge_1 or 0.0, one.rouge_2 or 0.0, one.rouge_l or 0.0),
        )
        for one in texts
    ]
    return {
        name: sum(column) / len(texts)
        for name, column in zip(SHARES, zip(*values, strict=True), strict=True)
    }


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return rows of the same uploads, this project's with the difference from DAGER's better row.

    Without one of as many clients, a row is as it is.
    """
    found: list[Row] = []
    for row in rows:
        peers = [one for one in rows if one["tool"] == "DAGER" and one["clients"] == row["clients"]]
        if row["tool"] == "DAGER" or not peers:
            found.append(row)
            continue
        best = max(peers, key=lambda one: float(one["rouge_1"]))
        pairs = zip(row["rouge_1_each"], best["rouge_1_each"], strict=True)
        apart = [mine - other for mine, other in pairs]
        ends = mean_interval(apart, bounds=(-1.0, 1.0))
        if ends is None and (halves := share_interval([(1.0 + one) / 2.0 for one in apart])):
            ends = 2.0 * halves[0] - 1.0, 2.0 * halves[1] - 1.0
        found.append({**row, "over_dager": mean(apart), **_ends("over_dager", ends)})
    return found


def _ends(name: str, ends: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = ends or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


if __name__ == "__main__":
    main()
