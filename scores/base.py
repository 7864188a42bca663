"""Base of the scorers of all inputs: how a reconstruction singles out its original, and words."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.inputs import References, Truth
from bract.schema.audit import Baseline, CalibrationBin, CellResult, Retrieval, Scores
from bract.scores.chance import FEWEST, Array, chance_of_any

_GUESSES = 16


@dataclass(frozen=True)
class ScoredImages:
    """Reconstructions beside the originals that they were matched to.

    Attributes
    ----------
    rows
        Scores of each pair.
    order
        ``images[order]`` are the reconstructions of the pairs.
    originals, labels
        The originals of the pairs and their true labels.
    label_accuracy
        Share of these labels that was recovered, as multisets; None where none were given.
    target_error
        Mean absolute error of targets that are numbers; None where they are none.
    identified
        Whether originals had to be retrieved; ``rank`` is None where not.
    candidates
        Images among which an original had to be retrieved, itself included; None without any.
    """

    rows: list[Scores]
    order: Tensor
    originals: Tensor
    labels: list[int]
    label_accuracy: float | None
    identified: bool
    candidates: int | None
    target_error: float | None = None


def target_error(recovered: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error of recovered numbers, whose order in a batch is arbitrary.

    Parameters
    ----------
    recovered, targets
        ``(N,)`` or ``(N, values)``, at least as many recovered as true; each true one is beside
        another, so that the whole error is least.
    """
    from scipy.optimize import linear_sum_assignment

    found, wanted = (v.reshape(len(v), -1).double().cpu() for v in (recovered, targets))
    apart = (wanted[:, None] - found[None]).abs().mean(dim=2).nan_to_num(math.inf, math.inf)
    rows, columns = linear_sum_assignment(apart.clamp_max(1e300).numpy())
    return float(apart[rows, columns].mean())


def target_guess(others: Tensor, targets: Tensor, *, seed: int) -> float:
    """Return the least `target_error` of what is guessed from numbers of others alone.

    The guesses are the others' mean for every target, and as many of the others' own numbers as
    there are targets: in any order these are nearer than the mean where a batch is large.

    Parameters
    ----------
    others, targets
        ``(M,)`` and ``(N,)``, or ``(M, values)`` and ``(N, values)``; neither is empty.
    seed
        Draws the others whose numbers are guesses, where a target has several values.
    """
    pool = others.reshape(len(others), -1).double().cpu()
    count = len(targets)
    mean = target_error(pool.mean(dim=0).expand(count, -1), targets)
    if pool.shape[1] == 1:
        middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return min(mean, target_error(pool.flatten().quantile(middles), targets))
    generator = torch.Generator().manual_seed(seed)
    draws = [pool[torch.randint(len(pool), (count,), generator=generator)] for _ in range(_GUESSES)]
    return min(mean, sum(target_error(draw, targets) for draw in draws) / _GUESSES)


def ranked(rows: Sequence[Scores], ranks: Sequence[int]) -> list[Scores]:
    """Return scores with the place of each original among the candidates, from 1."""
    return [
        row.model_copy(update={"rank": r, "identified_top1": r == 1, "identified_top5": r <= 5})
        for row, r in zip(rows, ranks, strict=True)
    ]


def beside(
    rows: Sequence[Scores],
    scored: Sequence[Scores],
    distance: Callable[[Scores], float],
    *,
    chosen: bool,
) -> list[Baseline]:
    """Return the scores of a baseline, a row for each of the reconstruction.

    Parameters
    ----------
    distance
        Lower for better scores.
    chosen
        Whether there were more originals than reconstructions to choose among: then the best row is
        beside the best reconstruction, the next beside the next. Else a row is of one original.
    """
    places = list(range(len(scored)))
    if chosen:
        places.sort(key=lambda i: distance(scored[i]))
        rows = sorted(rows, key=distance)
    placed = dict(zip(places, rows, strict=False))
    names = Baseline.model_fields
    return [Baseline(**{name: getattr(placed[i], name) for name in names}) for i in sorted(placed)]


class Scorer(ABC):
    """Scores reconstructions of one input against the originals of updates.

    Parameters
    ----------
    references
        Examples that no client of the update trained on; None leaves identification open.
    """

    most_classes: ClassVar[int | None] = None
    """Classes of originals beyond which an example is compared with those of its own alone."""

    perceptual = True
    """True where scores that run a network are computed, if the input has any."""

    def __init__(self, references: References | None) -> None:
        self.references = references

    @abstractmethod
    def score(
        self, images: Tensor, truth: Truth, *, recovered: Tensor | None = None
    ) -> ScoredImages:
        """Match reconstructions of the blind pick to the originals, and score the pairs."""

    @abstractmethod
    def oracle(self, restarts: Sequence[Tensor], scored: ScoredImages) -> list[Scores]:
        """Score the restart that is nearest to the originals."""

    @abstractmethod
    def baselines(
        self, made: Mapping[str, Tensor], scored: ScoredImages, truth: Truth, count: int
    ) -> dict[str, list[Baseline]]:
        """Score baselines as the attack was."""

    @abstractmethod
    def apart(self, example: Tensor, others: Tensor) -> Array:
        """Return how far one example ``(1, ...)`` is from M others, float64 ``(1, M)``."""

    def apart_from_class(self, example: Tensor, label: int) -> Array:
        """Return how far one example is from the references of a class, ``(1, M)``."""
        assert self.references is not None
        return self.apart(example, self.references.of_class(label))

    def classes(self, labels: Tensor) -> list[int]:
        """Return the class of each label by which references are grouped."""
        return [int(label) for label in labels.tolist()]

    def retrieval(
        self, images: Tensor, scored: ScoredImages, truth: Truth
    ) -> list[Retrieval | None]:
        """Bound for each pair the chance that an example without the gradient is as near.

        Where there were more reconstructions than originals to choose among, every one counts.
        """
        if self.references is None:
            return [None] * len(scored.rows)
        choices = max(len(images), len(truth.images))
        factor = choices / len(truth.images)
        counts = Counter(self.classes(truth.labels))
        found: list[Retrieval | None] = []
        labels = self.classes(torch.tensor(scored.labels))
        for at, original, label in zip(scored.order, scored.originals, labels, strict=True):
            example = images[at][None]
            few = self.most_classes is None or len(counts) <= self.most_classes
            apart = self._from_classes(example, counts if few else {label})
            if label not in apart:
                found.append(None)
                continue
            own = self.apart(example, original[None])[:, 0]
            mean = self.references.class_mean(torch.tensor([label]))
            middle = self.apart(example, mean).min()
            chance = factor * chance_of_any(own, apart, counts, label)
            least = factor * chance_of_any(0.0 * own, apart, counts, label)
            found.append(
                Retrieval(
                    chance=min(1.0, float(chance[0])),
                    least=min(1.0, float(least[0])),
                    nearest=bool(own[0] < min(apart[label].min(), middle)),
                    references=apart[label].shape[1],
                    choices=choices,
                )
            )
        return found

    def _from_classes(self, example: Tensor, classes: Collection[int]) -> dict[int, Array]:
        apart = {label: self.apart_from_class(example, label) for label in classes}
        return {label: values for label, values in apart.items() if values.shape[1] >= FEWEST}

    def cells(
        self,
        row: Tensor,
        found: float,
        certainty: Tensor | None,
        original: Tensor | None = None,
        label: float | None = None,
    ) -> list[CellResult]:
        """Return an example as cells of named columns; none of an input that has a picture."""
        del row, found, certainty, original, label
        return []

    def calibration(self, rows: Sequence[Sequence[CellResult]]) -> list[CalibrationBin]:
        """Compare the attacker's certainty of cells with how often it is right; none without."""
        del rows
        return []

    def notes(self) -> list[str]:
        """Return what is to be known about the scores."""
        return []
