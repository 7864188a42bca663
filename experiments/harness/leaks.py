"""The leak rule of an audit, on the uploads of a benchmark's row.

The rule is `bract.scores.leaks.LeakRule` itself, with the images of one
row as one family. References are images of the original's class that nobody attacked; where images
have no class, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bract.inputs import Truth
from bract.schema import AuditResult
from bract.schema.audit import ImageResult, Scores
from bract.scores.base import ScoredImages
from bract.scores.image import ImageScorer
from bract.scores.leaks import LeakRule
from experiments.harness.baselines import class_mean
from experiments.harness.images import ImageSet

CLASSLESS = ("faces", "grey", "photos")
"""Image sets whose labels are drawn at random."""


@dataclass(frozen=True)
class Pool:
    """References of an image set; see `bract.inputs.References`."""

    candidates: Tensor
    labels: Tensor

    @classmethod
    def of(cls, data: str, images: ImageSet) -> Pool:
        """Return the references of an image set, of one class where they have none."""
        found, labels = images.references, images.reference_labels
        assert found is not None and labels is not None
        return cls(found, torch.zeros_like(labels) if data in CLASSLESS else labels)

    def of_class(self, label: int) -> Tensor:
        """Return the references with this label."""
        return self.candidates[self.labels == label]

    def class_mean(self, wanted: Tensor) -> Tensor:
        """Return the mean reference of each label."""
        return class_mean(self.candidates, self.labels, wanted)

    def baselines(self, labels: Tensor, count: int, *, seed: int) -> dict[str, Tensor]:
        """Return the mean of each original's class, as many images as there are originals."""
        del count, seed
        return {"class_mean": self.class_mean(labels)}

    def without(self, truth: Truth) -> Pool:
        """Return all references: none is ever attacked."""
        del truth
        return self


def judged(data: str, images: ImageSet, made: Tensor, truth: Truth, scored: ScoredImages) -> Any:
    """Return the parts of one upload's result that the leak rule reads, as JSON values."""
    pool = Pool.of(data, images)
    zeros = torch.zeros_like(truth.labels)
    own = Truth(truth.images, zeros) if data in CLASSLESS else truth
    labels = [0] * len(scored.labels) if data in CLASSLESS else scored.labels
    scorer = ImageScorer(pool)
    paired = ScoredImages(**{**vars(scored), "labels": labels})
    found = scorer.retrieval(made, paired, own)
    beside = scorer.baselines(
        pool.baselines(torch.tensor(labels), len(made), seed=0), paired, own, len(made)
    ).get("class_mean", [])
    return [
        ImageResult(
            index=index,
            scores=Scores(psnr=scores.psnr, ssim=scores.ssim),
            retrieval=retrieval,
            baselines={"class_mean": beside[index]} if beside else {},
        ).to_dict()
        for index, (scores, retrieval) in enumerate(zip(scored.rows, found, strict=True))
    ]


def leaked(uploads: Sequence[Sequence[Any]]) -> tuple[list[bool], int]:
    """Decide a row: which images leaked, in their order, and how many could not be decided.

    Parameters
    ----------
    uploads
        What `judged` returned of each.
    """
    results = [
        AuditResult(
            question="reconstruction",
            round=1,
            client=f"client-{number}",
            attack="",
            images=[ImageResult.parse(image, source="row") for image in images],
            scored=len(images),
        )
        for number, images in enumerate(uploads)
    ]
    decisions = [one for each in LeakRule().decide(results) for one in each]
    return [one.reason is not None for one in decisions], sum(not one.decided for one in decisions)
