"""Score reconstructed signals: correlation over time, error as a share of the range, retrieval.

Signals are ``(N, channels, 1, length)`` in [0, 1], the declared range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bract.inputs import Truth
from bract.schema.audit import Baseline, Scores
from bract.scores.base import ScoredImages, Scorer, beside, ranked, target_error
from bract.scores.chance import Array
from bract.scores.image import (
    identifiability,
    label_accuracy,
    mse,
    oracle,
    pair,
    psnr,
    squared_error,
)

_FLAT = 1e-6
"""Standard deviation, as a share of the range, below which a channel has no shape over time."""


class SignalScorer(Scorer):
    """Scores signals against the originals of updates.

    Parameters
    ----------
    references
        Signals that no client of the update trained on; None leaves retrieval open.
    """

    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Pair the signals of the blind pick with the originals, and score the pairs."""
        order, kept = pair(images, truth.images)
        paired, originals = images[order], truth.images[kept]
        rows = _scores(paired, originals)
        candidates = None if self.references is None else self.references.candidates
        identified = candidates is not None and len(images) >= len(truth.images)
        if identified and candidates is not None:
            ranks = identifiability(paired, originals, candidates).tolist()
            rows = ranked(rows, ranks)
        numbers = truth.labels.is_floating_point()
        labels = [0] * len(rows) if numbers else truth.labels[kept].tolist()
        return ScoredImages(
            rows=rows,
            order=order,
            originals=originals,
            labels=labels,
            label_accuracy=None
            if recovered is None or numbers
            else label_accuracy(recovered, truth.labels[kept]),
            target_error=target_error(recovered[order], truth.labels[kept])
            if recovered is not None and numbers
            else None,
            identified=identified,
            candidates=None if candidates is None else len(candidates) + 1,
        )

    def oracle(self, restarts: Sequence[Tensor], scored: ScoredImages) -> list[Scores]:
        """Score the restart that is nearest to the originals of the blind pick."""
        best = restarts[oracle(restarts, scored.originals)]
        order, kept = pair(best, scored.originals)
        return _scores(best[order], scored.originals[kept])

    def baselines(
        self, made: Mapping[str, Tensor], scored: ScoredImages, truth: Truth, count: int
    ) -> dict[str, list[Baseline]]:
        """Score baselines as the attack was: as many signals, with the same choice of originals."""
        chosen = count < len(truth.images)
        found = {}
        for name, images in made.items():
            if len(images) >= len(scored.rows):
                order, kept = pair(images, truth.images)
                rows = _scores(images[order], truth.images[kept])
                found[name] = beside(rows, scored.rows, squared_error, chosen=chosen)
        return found

    def apart(self, example: Tensor, others: Tensor) -> Array:
        """Return the root of the mean squared error from each other signal, ``(1, M)``."""
        spread = (example.double().cpu() - others.double().cpu()).square().flatten(1).mean(dim=1)
        found: Array = spread.sqrt()[None].numpy()
        return found

    def classes(self, labels: Tensor) -> list[int]:
        """Return the class of each label; one for all where the target is a number."""
        return [0] * len(labels) if labels.is_floating_point() else super().classes(labels)


def correlation(signals: Tensor, originals: Tensor) -> Tensor:
    """Pearson's correlation over time, the mean over channels, float64 ``(N,)`` in [-1, 1].

    A channel that is constant over time has no shape: it correlates by 1 with a constant one, and
    by 0 with any other.
    """
    found, wanted = (part.squeeze(2).double().cpu() for part in (signals, originals))
    found, wanted = (part - part.mean(dim=2, keepdim=True) for part in (found, wanted))
    sizes = [part.square().mean(dim=2).sqrt() for part in (found, wanted)]
    flat = [size < _FLAT for size in sizes]
    each = (found * wanted).mean(dim=2) / (sizes[0] * sizes[1]).clamp_min(_FLAT**2)
    each = torch.where(flat[0] | flat[1], (flat[0] & flat[1]).double(), each)
    return each.clamp(-1.0, 1.0).mean(dim=1)


def _scores(signals: Tensor, originals: Tensor) -> list[Scores]:
    squared, decibels = mse(signals, originals), psnr(signals, originals)
    alike = correlation(signals, originals)
    return [
        Scores(
            mse=float(squared[i]),
            psnr=float(decibels[i]),
            correlation=float(alike[i]),
            nrmse=float(squared[i].sqrt()),
        )
        for i in range(len(signals))
    ]
