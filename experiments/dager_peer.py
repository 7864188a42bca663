"""DAGER's own code beside `token-span`, on identical gradients of texts.

    git clone https://github.com/insait-institute/dager-gradient-inversion FOLDER   # at 4383e25
    OMP_NUM_THREADS=1 python -m experiments.dager_peer --code FOLDER [--resume FILE] [--json]

Clients, models and scores are those of `experiments.text_leaks`, of decoders. DAGER's span checks
and its filter of sequences run unchanged, with the thresholds and options of its own ``gpt2.sh``,
and by its default tolerance of ranks as well as by that which its README names for long texts,
``--rank_tol 1e-9``. The loop over positions of its ``attack.py``, which needs data sets and a
device, is restated here. No text and no network chose a setting of either. Seconds are the process'
own, on one thread, an upload.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.methods.token_span.stages import inputs_of
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.audit.questions.reconstruction.scores.text import TextScorer
from bract.data.tokens import as_example
from bract.errors import BractError
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.texts import FIRST_SEED, SentTexts, public_texts, send_texts
from experiments.harness.uploads import captured_network
from experiments.text_leaks import SMALL

COLUMNS = (
    *("tool", "rank_tol", "model", "batch", "clients", "refused", "recall", "exact", "precision"),
    *("rouge_l", "cpu_seconds"),
)
PLAN = ((SMALL, "words", 1), (SMALL, "words", 4), (SMALL, "words", 16))
RANK_TOLERANCES = (None, 1e-9)
CUTOFF = 20
"""``rank_cutoff`` of its ``args_factory.py``."""

Rebuild = Callable[[SentTexts, int], Tensor | None]
"""Return the texts of an upload, as an input alike, or None where it is refused."""


def main() -> None:
    """Attack every upload by each tool; print the table or JSON."""
    made = parser(__doc__, "resume")
    made.add_argument("--code", type=Path, required=True, help="folder of DAGER's repository")
    made.add_argument("--clients", type=int, default=2)
    made.add_argument("--seconds", type=float, default=300.0, help="of `token-span`, at most")
    made.add_argument(
        "--most", type=int, default=20000, help="orders that its encoder filter tries"
    )
    made.add_argument("--finished", action="store_true", help="only what --resume holds")
    options = parse(made)
    published = Published(options.code)
    done = Finished(options.resume, "experiments.dager_peer", keep_older=options.finished)
    rows: list[Row] = []
    for model, tokenizer, batch in PLAN:
        tools: list[tuple[str, float | None, Rebuild]] = [
            ("DAGER", tolerance, published.by(tolerance)) for tolerance in RANK_TOLERANCES
        ]
        tools.append(("bract", None, by_bract(options.seconds)))
        for tool, tolerance, rebuild in tools:
            what: Row = {
                **{
                    "tool": tool,
                    "rank_tol": tolerance,
                    "model": model,
                    "tokenizer": tokenizer,
                    "batch": batch,
                },
                **{"clients": options.clients, "seconds": options.seconds},
            }
            row = done.get(what)
            if row is None and not options.finished:
                row = done.add(what, row_of(what, rebuild, options.clients))
            if row is not None:
                rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row_of(what: Row, rebuild: Rebuild, clients: int) -> Row:
    """Attack as many clients as asked for, each with texts of its own."""
    batch = int(what["batch"])
    recall: list[float] = []
    precision: list[float] = []
    rouge: list[float] = []
    exact, refused, spent = 0, 0, 0.0
    for seed in range(FIRST_SEED["score"], FIRST_SEED["score"] + clients):
        sent = send_texts(
            "notes", batch, seed=seed, model=str(what["model"]), tokenizer=str(what["tokenizer"])
        )
        begun = time.process_time()
        found = rebuild(sent, seed)
        spent += time.process_time() - begun
        if found is None:
            refused += 1
            recall, precision, rouge = (
                values + [0.0] * batch for values in (recall, precision, rouge)
            )
            continue
        references = public_texts("notes", str(what["tokenizer"]), sent.schema)
        scored = TextScorer(sent.schema, references).score(found, sent.truth)
        recall += [one.features or 0.0 for one in scored.rows]
        precision += [one.precision or 0.0 for one in scored.rows]
        rouge += [one.rouge_l or 0.0 for one in scored.rows]
        exact += sum(bool(one.exact) for one in scored.rows)
    return {
        **what,
        "refused": refused,
        "recall": mean(recall),
        "exact": exact / (batch * clients),
        "precision": mean(precision),
        "rouge_l": mean(rouge),
        "cpu_seconds": spent / clients,
    }


def by_bract(seconds: float) -> Rebuild:
    """Return `token-span` with its own settings."""

    def rebuild(sent: SentTexts, seed: int) -> Tensor | None:
        (found,) = reconstruct(
            sent.captured,
            TokenSpan(seconds=seconds),
            budget=Budget(max_images=len(sent.truth.labels)),
            seed=seed,
            device="cpu",
        )
        if isinstance(found, Reconstruction):
            return found.images
        note(found.reason)
        return None

    return rebuild


class Published:
    """DAGER's functions for decoders, from a clone of its repository."""

    def __init__(self, code: Path) -> None:
        if not (code / "utils" / "filtering_decoder.py").is_file():
            raise BractError(
                f"{code}: is no clone of github.com/insait-institute/dager-gradient-inversion; "
                "see --help"
            )
        with _importing(code):
            self.functional = importlib.import_module("utils.functional")
            self.decoder = importlib.import_module("utils.filtering_decoder")

    def by(self, tolerance: float | None) -> Rebuild:
        """Return DAGER's attack by a tolerance of ranks; None is its default."""
        return lambda sent, seed: self.rebuild(sent, seed, tolerance)

    def rebuild(self, sent: SentTexts, seed: int, tolerance: float | None = None) -> Tensor | None:
        """Run DAGER's code on an upload; return the texts, or None where it finds none."""
        torch.manual_seed(seed)
        shown = Shown(sent)
        batch = len(sent.truth.labels)
        options = _options(batch)
        with (
            torch.no_grad(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            spans = self._spans(shown, tolerance)
            found = self._sequences(shown, spans, options)
        if not found:
            return None
        ids = torch.full((batch, sent.schema.length), sent.schema.padding)
        for row, sequence in zip(ids, found, strict=False):
            row[: len(sequence)] = torch.tensor(sequence)
        return as_example(ids, sent.schema)

    def _spans(self, shown: Shown, tolerance: float | None) -> list[Tensor]:
        """Decompose the gradients of the first two attention layers, at one rank for both.

        As its ``get_matrices_expansions``: the largest rank among up to ten layers.
        """
        ranks = [np.linalg.matrix_rank(one.numpy(), tol=tolerance) for one in shown.gradients[:10]]
        rank = min(int(max(ranks)), shown.width - CUTOFF)
        return [self.functional.get_layer_decomp(one, B=rank)[1] for one in shown.gradients[:2]]

    def _sequences(self, shown: Shown, spans: list[Tensor], options: Namespace) -> list[list[int]]:
        """Filter tokens at each position, then sequences, the most certain first."""
        ids = self._tokens(shown, spans[0], options)
        if not ids:
            return []
        found, scores, others, their_scores = self.decoder.filter_decoder(
            options, shown, spans, ids
        )
        if len(found) < options.batch_size:
            pairs = [(s, o) for s, o in zip(their_scores, others, strict=True) if o]
            found, scores = found + [o for _, o in pairs], scores + [s for s, _ in pairs]
        return _distinct(found, scores, options)

    def _tokens(self, shown: Shown, span: Tensor, options: Namespace) -> list[list[int]]:
        """Return token ids at each position, as its ``filter_l1``."""
        found: list[list[int]] = []
        for position in range(shown.length):
            _, ids = self.functional.get_top_B_in_span(
                span, shown.embeddings(position), options.batch_size, 1e-5, "l2"
            )
            if not len(ids):
                break
            found.append(ids.tolist())
        return found


class Shown:
    """A client's model as DAGER's functions see theirs.

    Attributes
    ----------
    gradients
        Of the attention's first matrix in each layer, ``(outputs, inputs)``.
    """

    start_token = None
    """A decoder of GPT-2's shape has no first token in its code."""

    def __init__(self, sent: SentTexts) -> None:
        self.network = captured_network(sent.captured)
        self.length, self.pad_token = sent.schema.length, sent.schema.padding
        names = [name for name, _ in self.network.named_modules()]
        self.layers = [name for name in names if name.endswith("attn.c_attn")]
        update = sent.captured.gradient()
        self.gradients = [update[f"{name}.weight"].T.contiguous() for name in self.layers]
        self.width = self.gradients[0].shape[1]
        self._held = [m for m in self.network.modules() if isinstance(m, nn.Embedding)]

    def embeddings(self, position: int) -> Tensor:
        """Return what enters the first attention for each token, ``(1, V, width)``."""
        words, positions = self._held
        norm: Any = self.network.get_submodule(self.layers[0].replace("attn.c_attn", "ln_1"))
        entering: Tensor = norm((words.weight + positions.weight[position])[None])
        return entering.detach()

    def get_layer_inputs(self, sentences: Tensor, **_: Any) -> list[Tensor]:
        """Return what enters the second attention."""
        return [inputs_of(self.network, [self.layers[1]], sentences.long())[self.layers[1]]]

    def has_rope(self) -> bool:
        """Positions are embedded, not rotated."""
        return False

    def has_bos(self) -> bool:
        """Whether every text begins with one token."""
        return self.start_token is not None


def _options(batch: int) -> Namespace:
    """Return the defaults of its ``args_factory.py`` and scripts."""
    return Namespace(
        pad="right",
        device="cpu",
        batch_size=batch,
        parallel=1000,
        n_layers=2,
        dist_norm="l2",
        l2_span_thresh=1e-3,
        distinct_thresh=0.7,
        reduce_incorrect=0,
        defense_noise=None,
    )


def _distinct(found: list[list[int]], scores: list[float], options: Namespace) -> list[list[int]]:
    """Return those below its threshold, then the nearest that resemble none, to the batch's size.

    As the end of its ``reconstruct``, but that nothing is chosen by the truth.
    """
    order = sorted(range(len(found)), key=lambda i: scores[i])
    certain = [found[i] for i in order if scores[i] < options.l2_span_thresh]
    for i in order:
        if len(certain) >= options.batch_size:
            break
        if scores[i] < options.l2_span_thresh:
            continue
        alike = (
            sum(a == b for a, b in zip(found[i], one, strict=False))
            >= min(len(found[i]), len(one)) * options.distinct_thresh
            for one in certain
        )
        if not any(alike):
            certain.append(found[i])
    return certain[: options.batch_size]


@contextlib.contextmanager
def _importing(code: Path) -> Iterator[None]:
    """Import from a folder whose modules have names that others have too."""
    sys.path.insert(0, str(code.resolve()))
    for name in [n for n in sys.modules if n.split(".")[0] in ("utils", "constants")]:
        sys.modules.pop(name)
    try:
        yield
    finally:
        sys.path.remove(str(code.resolve()))


if __name__ == "__main__":
    main()
