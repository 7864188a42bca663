"""From a reconstruction to what the audit writes: scores, baselines without a gradient, signals."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from bract.attacks import Budget, Case, Reconstruction, attack
from bract.attacks.methods.baselines import prior_only
from bract.audit.pictures import save_picture
from bract.audit.scoring.chance import FEWEST, chance_of_any, dissimilarity, views
from bract.audit.scoring.diagnosis import signals
from bract.audit.scoring.prior_baselines import prior_baselines
from bract.audit.scoring.reference import KeptImages, Reference
from bract.audit.scoring.scoring import (
    ScoredImages,
    Truth,
    lpips_notes,
    oracle,
    score_images,
)
from bract.audit.scoring.truth_check import truth_check
from bract.config import DataConfig
from bract.errors import BractError
from bract.protocol.observation import Observation
from bract.schema import Baseline, ImageResult, Retrieval, Signals, Told
from bract.seeds import derive_seed

_log = logging.getLogger(__name__)

PRIOR_ITERATIONS = 200
"""Steps of the prior-only baseline: with no gradient to match, it settles early."""

MOST_CLASSES = 20
"""Classes of one client whose reference images are all decoded; beyond, the matched one stands
for the others."""


KEPT_REFERENCE = (
    "Nobody named test data (`data:` in bract.yaml), so reconstructions are held against images "
    "that other clients kept: where those look unlike each other, being nearer to one's own says "
    "less."
)
NO_REFERENCE = (
    "Nobody named test data (`data:` in bract.yaml), and no other client kept images: scores stand "
    "without images to tell an original from, and whether an image leaked is left open."
)


@dataclass(frozen=True)
class Attempt:
    """One attack as it ran; ``own`` is the truth of its last round, of several scored together."""

    case: Case
    result: Reconstruction
    told: Told | None = None
    own: Truth | None = None

    @property
    def observation(self) -> Observation:
        """The observation under attack."""
        return self.case.observation


@dataclass(frozen=True)
class Judged:
    """Facts about an attempt; the fields are those of `AuditResult`."""

    images: list[ImageResult]
    diagnosis: Signals | None
    notes: list[str]
    scored: bool = False
    label_accuracy: float | None = None
    candidates: int | None = None
    baselines: dict[str, Baseline] = field(default_factory=dict)


@dataclass
class Judge:
    """Scores attempts; reference images and prior-only images are made once.

    Parameters
    ----------
    data
        Where the reference images come from; they are test data, which nobody trained on. None
        takes the images that other clients kept.
    seed, device, max_images
        As in the audit's choice.
    """

    data: DataConfig | None
    seed: int
    device: str
    max_images: int
    kept: KeptImages | None = None
    reference: Reference | None = field(default=None, init=False, repr=False)
    _priors: dict[tuple[str, int], Tensor | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.reference = None if self.data is None else Reference(self.data, self.seed)

    def _reference_for(self, truth: Truth) -> Reference | None:
        """Return what this update's originals are told from; None where there is nothing."""
        if self.reference is not None or self.kept is None:
            return self.reference
        return self.kept.without(truth.images)

    def judge(self, attempt: Attempt, truth: Truth | None, path: Path) -> Judged:
        """Save the pictures beside ``path``; return what there is to say, scored with a truth."""
        result = attempt.result
        diagnosis = self._diagnose(attempt, attempt.own or truth)
        if truth is None:
            images = [_image(result, i, i, path) for i in range(len(result.images))]
            return Judged(images, diagnosis, lpips_notes())
        reference = self._reference_for(truth)
        candidates = None if reference is None else reference.candidates
        scored = score_images(
            result.images,
            truth,
            recovered=result.labels,
            candidates=candidates,
        )
        baselines = self._baselines(attempt, scored, truth, reference)
        retrieved = self._retrieve(result.images, scored, truth, reference)
        pick = result.trials[oracle([t.images for t in result.trials], scored.originals)]
        best = score_images(
            pick.images,
            Truth(scored.originals, torch.tensor(scored.labels)),
            candidates=candidates,
            identify=scored.identified,
        ).rows
        return Judged(
            images=[
                _image(result, i, int(scored.order[i]), path).model_copy(
                    update={
                        "true_label": scored.labels[i],
                        "original": save_picture(scored.originals[i], path, i, "original"),
                        "scores": row,
                        "oracle": best[i],
                        "baselines": {name: rows[i] for name, rows in baselines.items()},
                        "retrieval": retrieved[i],
                    }
                )
                for i, row in enumerate(scored.rows)
            ],
            diagnosis=diagnosis,
            notes=[*lpips_notes(), *self._reference_note(reference)],
            scored=True,
            label_accuracy=scored.label_accuracy,
            candidates=scored.candidates,
            baselines={name: _mean(rows) for name, rows in baselines.items()},
        )

    def _reference_note(self, reference: Reference | None) -> list[str]:
        if self.reference is not None:
            return []
        return [NO_REFERENCE if reference is None else KEPT_REFERENCE]

    def _diagnose(self, attempt: Attempt, truth: Truth | None) -> Signals | None:
        """Measure why it got this far; None where no gradient was matched."""
        try:
            found = signals(attempt.case, attempt.result)
        except BractError as error:
            _log.info("%s: no diagnosis: %s", attempt.observation.key, error)
            return None
        check = None
        if truth is not None:
            try:
                check = truth_check(attempt.case, truth.images, truth.labels)
            except BractError as error:
                _log.info("%s: no truth check: %s", attempt.observation.key, error)
        return found.model_copy(update={"truth_check": check, "told": attempt.told})

    def _baselines(
        self,
        attempt: Attempt,
        scored: ScoredImages,
        truth: Truth,
        reference: Reference | None,
    ) -> dict[str, list[Baseline]]:
        """Score what needs no gradient as the attack was: as many images, with the same choice.

        Each set is matched to all of the client's originals. Where there are as many images as
        originals, a row is that of the original; of a choice among more originals the best row
        stands beside the best reconstruction, the next beside the next.
        """
        count = len(attempt.result.images)
        labels = torch.tensor(scored.labels)
        seed = derive_seed(self.seed, "baseline", attempt.observation.key)
        made: dict[str, Tensor | None] = {"prior_only": self._prior(attempt, count)}
        if attempt.case.public is not None:
            made |= prior_baselines(attempt.case.public, scored, count, seed)
        if reference is not None:
            wanted = labels[torch.arange(count) % len(labels)]
            made = {
                "class_mean": reference.class_mean(wanted),
                "random_image": reference.random_image(count, seed=seed),
                **made,
            }
        places = list(range(len(scored.rows)))
        if count < len(truth.images):
            places.sort(key=lambda i: scored.rows[i].mse or 0.0)
        baselines = {}
        for name, images in made.items():
            if images is not None and len(images) >= len(places):
                rows = score_images(images, truth, perceptual=False).rows
                if count < len(truth.images):
                    rows = sorted(rows, key=lambda row: row.mse or 0.0)
                beside = dict(zip(places, rows, strict=True))
                baselines[name] = [
                    Baseline(**{key: getattr(beside[i], key) for key in Baseline.model_fields})
                    for i in range(len(places))
                ]
        return baselines

    def _retrieve(
        self, images: Tensor, scored: ScoredImages, truth: Truth, reference: Reference | None
    ) -> list[Retrieval | None]:
        """Say of each pair how likely an image without the gradient is as near to an original.

        Where there were more images than originals to choose among, every one of them counts.
        """
        if reference is None:
            return [None] * len(scored.rows)
        choices = max(len(images), len(truth.images))
        factor = choices / len(truth.images)
        counts = Counter(truth.labels.tolist())
        found: list[Retrieval | None] = []
        for at, original, label in zip(scored.order, scored.originals, scored.labels, strict=True):
            image = images[at][None]
            classes = counts if len(counts) <= MOST_CLASSES else {label: 1}
            apart = {
                c: dissimilarity(image, others)
                for c in classes
                if (others := reference.of_class(c)).shape[1] >= FEWEST
            }
            if label not in apart:
                found.append(None)
                continue
            own = dissimilarity(image, views(original[None]))[:, 0]
            mean = dissimilarity(image, views(reference.class_mean(torch.tensor([label]))))
            chance = factor * chance_of_any(own, apart, counts, label)
            least = factor * chance_of_any(0.0 * own, apart, counts, label)
            found.append(
                Retrieval(
                    chance=min(1.0, float(chance[0])),
                    least=min(1.0, float(least[0])),
                    nearest=bool(own[0] < min(apart[label].min(), mean.min())),
                    references=apart[label].shape[1],
                    choices=choices,
                )
            )
        return found

    def _prior(self, attempt: Attempt, count: int) -> Tensor | None:
        """Return what the attack makes without a gradient to match; the same for every client."""
        name = attempt.result.pick.attack
        if (name, count) not in self._priors:
            try:
                # Starts go by round and client: not by those of whose update was scored first.
                anybody = replace(attempt.observation, round=1, client="anybody")
                result = prior_only(attack(name))(
                    anybody,
                    budget=Budget(iterations=PRIOR_ITERATIONS, max_images=self.max_images),
                    seed=derive_seed(self.seed, "prior", name),
                    device=self.device,
                    public=attempt.case.public,
                )
                self._priors[name, count] = result.images[:count]
            except BractError as error:
                _log.info("%s: no prior-only baseline: %s", name, str(error))
                self._priors[name, count] = None
        return self._priors[name, count]


def _image(result: Reconstruction, index: int, row: int, path: Path) -> ImageResult:
    """Save one reconstruction; return what the attacker knows of it."""
    probabilities = result.label_probabilities[row]
    return ImageResult(
        index=index,
        label=int(probabilities.argmax()),
        label_confidence=float(probabilities.max()),
        reconstruction=save_picture(result.images[row], path, index, "reconstruction"),
    )


def _mean(rows: Sequence[Baseline]) -> Baseline:
    """Return the mean of every score over the rows that have it."""
    known = {
        name: [value for row in rows if (value := getattr(row, name)) is not None]
        for name in Baseline.model_fields
    }
    return Baseline(**{name: fmean(values) if values else None for name, values in known.items()})
