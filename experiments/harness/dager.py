"""DAGER's own code on a client's upload: the model as its functions see theirs."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.stages import inputs_of, inputs_while
from bract.data.tokens import as_example
from bract.errors import BractError
from experiments.harness.texts import SentTexts
from experiments.harness.uploads import captured_network

CUTOFF = 20
"""``rank_cutoff`` of its ``args_factory.py``."""

MOST_ORDERS = 10_000_000
"""``maxC`` of its ``args_factory.py``."""


class Published:
    """DAGER's functions, from a clone of its repository."""

    def __init__(self, code: Path) -> None:
        if not (code / "utils" / "filtering_decoder.py").is_file():
            raise BractError(
                f"{code}: is no clone of github.com/insait-institute/dager-gradient-inversion; "
                "see --help",
                code="file-missing",
            )
        with _importing(code):
            self.functional = importlib.import_module("utils.functional")
            self.decoder = importlib.import_module("utils.filtering_decoder")
            self.encoder = importlib.import_module("utils.filtering_encoder")

    def rebuild(
        self, sent: SentTexts, seed: int, tolerance: float | None, options: Options
    ) -> tuple[Tensor | None, int]:
        """Run DAGER's code on an upload; return the texts, or None where it finds none."""
        torch.manual_seed(seed)
        shown = shown_of(sent)
        with (
            torch.no_grad(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            spans = self._spans(shown, tolerance)
            if isinstance(shown, ShownEncoder):
                found = self._texts(shown, spans, options)
            else:
                found = self._sequences(shown, spans, options)
        if not found:
            return None, shown.tried
        ids = torch.full((options.batch_size, sent.schema.length), sent.schema.padding)
        for row, sequence in zip(ids, found, strict=False):
            row[: len(sequence)] = torch.tensor(sequence)
        return as_example(ids, sent.schema), shown.tried

    def _spans(self, shown: Shown, tolerance: float | None) -> list[Tensor]:
        """Decompose the gradients of the first two attention layers, at one rank for both.

        As its ``get_matrices_expansions``: the largest rank among up to ten layers.
        """
        ranks = [np.linalg.matrix_rank(one.numpy(), tol=tolerance) for one in shown.gradients[:10]]
        rank = min(int(max(ranks)), shown.width - CUTOFF)
        return [self.functional.get_layer_decomp(one, B=rank)[1] for one in shown.gradients[:2]]

    def _sequences(self, shown: Shown, spans: list[Tensor], options: Options) -> list[list[int]]:
        """Filter a decoder's tokens at each position, then sequences, the most certain first."""
        ids = [ids for ids, _ in self._tokens(shown, spans[0], options)]
        if not ids:
            return []
        found, scores, others, their_scores = self.decoder.filter_decoder(
            options, shown, spans, ids
        )
        if len(found) < options.batch_size:
            pairs = [(s, o) for s, o in zip(their_scores, others, strict=True) if o]
            found, scores = found + [o for _, o in pairs], scores + [s for s, _ in pairs]
        return distinct(found, scores, options)

    def _texts(self, shown: ShownEncoder, spans: list[Tensor], options: Options) -> list[list[int]]:
        """Filter an encoder's tokens at each position, then orders up to each last token.

        As its ``filter_l1`` and ``reconstruct``, with the heuristics of ``bert.sh``: so many tokens
        a position as there are texts, and none that a certain text has there.
        """
        ids: list[list[int]] = []
        ends: list[tuple[int, int]] = []
        for place, (here, kinds) in enumerate(self._tokens(shown, spans[0], options)):
            pairs = list(zip(here, kinds, strict=True))
            ends += [(place, kind) for token, kind in pairs if token == shown.eos_token]
            ids.append([token for token in here if token != shown.eos_token])
        found: list[list[int]] = []
        scores: list[float] = []
        for number, (length, kind) in enumerate(ends):
            options.share(len(ends) - number)
            pairs_of = list(zip(found, scores, strict=True))
            certain = [text for text, score in pairs_of if score < options.l2_span_thresh]
            others = [(t, score) for t, score in pairs_of if score >= options.l2_span_thresh]
            texts, theirs = self.encoder.filter_encoder(
                options,
                shown,
                spans[1],
                length,
                kind,
                ids,
                certain,
                [text for text, _ in others],
                [score for _, score in others],
                options.batch_size,
                options.batch_size,
            )
            found, scores = found + texts, scores + theirs
        kept = [i for i, score in enumerate(scores) if score < float("inf")]
        return distinct([found[i] for i in kept], [scores[i] for i in kept], options)

    def _tokens(
        self, shown: Shown, span: Tensor, options: Options
    ) -> list[tuple[list[int], list[int]]]:
        """Return token ids at each position, and their types, as its ``filter_l1``."""
        found = []
        for position in range(shown.length):
            _, ids, *types = self.functional.get_top_B_in_span(
                span, shown.embeddings(position), options.batch_size, options.l1_span_thresh, "l2"
            )
            if not len(ids):
                break
            found.append((ids.tolist(), types[0].tolist() if types else [0] * len(ids)))
        return found


class Shown:
    """A client's model as DAGER's functions see theirs.

    Attributes
    ----------
    gradients
        Of the attention's first matrix in each layer, ``(outputs, inputs)``.
    tried
        Orders of tokens that a filter has tried so far.
    """

    attention: ClassVar[str]
    """End of the names of the attention's first matrices."""

    start_token: int | None = None
    """A decoder of GPT-2's shape has no first token in its code."""

    def __init__(self, sent: SentTexts) -> None:
        self.network = captured_network(sent.captured)
        self.length, self.pad_token = sent.schema.length, sent.schema.padding
        names = [name for name, _ in self.network.named_modules()]
        self.layers = [name for name in names if name.endswith(self.attention)]
        update = sent.captured.gradient()
        self.gradients = [self.rows(update[f"{name}.weight"]) for name in self.layers]
        self.width = self.gradients[0].shape[1]
        self.tried = 0
        self._held = [m for m in self.network.modules() if isinstance(m, nn.Embedding)]

    def rows(self, gradient: Tensor) -> Tensor:
        """Return a gradient as ``(outputs, inputs)``."""
        return gradient

    def embeddings(self, position: int) -> Tensor:
        """Return what enters the first attention for each token, ``(1, V, ..., width)``."""
        raise NotImplementedError

    def has_rope(self) -> bool:
        """Positions are embedded, not rotated."""
        return False

    def has_bos(self) -> bool:
        """Return whether every text begins with one token."""
        return self.start_token is not None

    def is_bert(self) -> bool:
        """Return whether tokens have types."""
        return False


class ShownDecoder(Shown):
    """A model of GPT-2's shape."""

    attention: ClassVar[str] = "attn.c_attn"

    def rows(self, gradient: Tensor) -> Tensor:
        """Return a gradient as ``(outputs, inputs)``."""
        return gradient.T.contiguous()

    def embeddings(self, position: int) -> Tensor:
        """Return what enters the first attention for each token, ``(1, V, width)``."""
        words, positions = self._held
        norm: Any = self.network.get_submodule(self.layers[0].replace("attn.c_attn", "ln_1"))
        entering: Tensor = norm((words.weight + positions.weight[position])[None])
        return entering.detach()

    def get_layer_inputs(self, sentences: Tensor, **_: Any) -> list[Tensor]:
        """Return what enters the second attention."""
        return [inputs_of(self.network, [self.layers[1]], sentences.long())[self.layers[1]]]


class ShownEncoder(Shown):
    """A model of BERT's shape."""

    attention: ClassVar[str] = "attention.self.query"

    def __init__(self, sent: SentTexts) -> None:
        super().__init__(sent)
        # The special tokens are padding, unknown, and those that begin and end a text.
        self.start_token, self.eos_token = sent.schema.special[-2:]

    def is_bert(self) -> bool:
        """Return whether tokens have types."""
        return True

    def embeddings(self, position: int) -> Tensor:
        """Return what enters the first attention for each token and type, ``(1, V, 2, width)``."""
        words, positions, types = self._held
        norm: Any = self.network.get_submodule("body.bert.embeddings.LayerNorm")
        own = words.weight[:, None] + types.weight + positions.weight[position]
        entering: Tensor = norm(own[None])
        return entering.detach()

    def get_layer_inputs(self, sentences: Tensor, types: Tensor) -> list[Tensor]:
        """Return what enters the second attention."""
        self.tried += len(sentences)
        body: Any = self.network.get_submodule("body")
        seen = inputs_while(
            lambda: body(
                input_ids=sentences,
                token_type_ids=types,
                attention_mask=torch.ones_like(sentences),
            ),
            self.network,
            [self.layers[1]],
            tuple(sentences.shape),
        )
        return [seen[self.layers[1]].clone()]


def shown_of(sent: SentTexts) -> Shown:
    """Return a client's model as DAGER's functions see theirs."""
    encoder = (sent.captured.declaration.model or "").startswith("text-encoder")
    return ShownEncoder(sent) if encoder else ShownDecoder(sent)


class Options(Namespace):
    """The defaults of its ``args_factory.py`` and scripts."""

    def __init__(self, batch: int, threshold: float, seconds: float) -> None:
        super().__init__(
            pad="right",
            device="cpu",
            batch_size=batch,
            parallel=1000,
            n_layers=2,
            dist_norm="l2",
            l1_span_thresh=threshold,
            l2_span_thresh=1e-3,
            distinct_thresh=0.7,
            reduce_incorrect=0,
            defense_noise=None,
        )
        self._seconds = seconds
        self._end: float | None = None
        self._until = 0.0

    def share(self, lengths: int) -> None:
        """Give the next of so many lengths an equal share of the seconds that are left.

        They begin with the first length.
        """
        now = time.process_time()
        if self._end is None:
            self._end = now + self._seconds
        self._until = now + (self._end - now) / lengths

    @property
    def maxC(self) -> int:  # noqa: N802
        """Orders that its filter of encoders tries at most: none once the share is spent."""
        return MOST_ORDERS if time.process_time() < self._until else 0


def distinct(found: list[list[int]], scores: list[float], options: Options) -> list[list[int]]:
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
