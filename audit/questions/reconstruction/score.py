"""From a reconstruction to its record: scores, baselines without a gradient, signals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bract.attacks import Case, Reconstruction
from bract.audit.description.truth_check import truth_check, truth_match
from bract.audit.questions.reconstruction.baselines import Baselines
from bract.audit.questions.reconstruction.diagnosis import signals
from bract.config import DataConfig
from bract.errors import BractError
from bract.inputs import Input, References, Truth
from bract.inputs.base import content_bytes, input_of
from bract.models.losses import loss_of
from bract.schema.audit import ImageResult, InformationEstimate, ScoreRecord, Signals
from bract.scores.base import ScoredImages, target_guess
from bract.scores.image import mean_of
from bract.scores.scorers import Scorer, scorer_of

_log = logging.getLogger(__name__)

KEPT_REFERENCE = (
    "No test data are named (`data:` in bract.yaml), so reconstructions are held against examples "
    "that other clients kept: where those look unlike each other, being nearer to one's own says "
    "less."
)
NO_REFERENCE = (
    "No test data are named (`data:` in bract.yaml), and no other client kept examples: scores "
    "have none to tell an original from, and whether one leaked is left open."
)


@dataclass(frozen=True)
class Attempt:
    """One attack as it ran.

    Attributes
    ----------
    own
        The truth of its last round, of several scored together.
    mine
        Returns what its clients kept in any round.
    """

    case: Case
    result: Reconstruction
    estimate: InformationEstimate | None = None
    own: Truth | None = None
    mine: Callable[[], list[Truth]] = list


@dataclass
class Judge:
    """Scores attempts; references are read once.

    Parameters
    ----------
    data
        Where references come from: test data, which no client trained on. None takes ``kept``.
    seed, device, max_images
        As in the audit's request.
    kept
        Returns what all clients kept.
    """

    data: DataConfig | None
    seed: int
    device: str
    max_images: int
    kept: Callable[[], list[Truth]] = list
    _scorers: dict[str, Scorer] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._baselines = Baselines(self.seed, self.device, self.max_images)

    def share(self, other: Judge) -> None:
        """Take another judge's baselines where they are those that this one would make."""
        mine = (self.seed, self.device, self.max_images)
        if mine == (other.seed, other.device, other.max_images):
            self._baselines = other._baselines

    def judge(self, attempt: Attempt, truth: Truth | None, path: Path) -> ScoreRecord:
        """Save the images beside ``path`` and return what was measured, with scores for a truth."""
        declaration = attempt.case.observation.declaration
        result, kind = attempt.result, input_of(declaration)
        loss = loss_of(declaration.loss)
        labelled = loss.of_classes
        found = self._diagnose(attempt, attempt.own or truth)
        if truth is None:
            plain = scorer_of(kind, None)
            images = [
                _image(kind, plain, result, i, i, path, labelled=labelled)
                for i in range(len(result.images))
            ]
            return ScoreRecord(images=images, signals=found, notes=plain.notes())
        scorer = self.scorer(kind, truth, attempt.mine)
        numbers = truth.labels.is_floating_point() and loss.values and kind.name != "table"
        named = result.label_probabilities if loss.per_token or numbers else result.targets
        scored = scorer.score(result.images, truth, recovered=named if loss.labelled else None)
        made = self._baselines.made(attempt.case, result, scored, scorer.references)
        baselines = scorer.baselines(made, scored, truth, len(result.images))
        retrieved = scorer.retrieval(result.images, scored, truth)
        oracle = scorer.oracle([trial.images for trial in result.trials], scored)
        images = [
            _image(
                kind, scorer, result, i, int(scored.order[i]), path, scored, labelled=labelled
            ).model_copy(
                update={
                    "true_label": int(scored.labels[i]) if labelled else None,
                    "original": kind.save(scored.originals[i], path, i, "original"),
                    "scores": row,
                    "oracle": oracle[i],
                    "baselines": {name: rows[i] for name, rows in baselines.items()},
                    "retrieval": retrieved[i],
                }
            )
            for i, row in enumerate(scored.rows)
        ]
        return ScoreRecord(
            images=images,
            scored=len(images),
            signals=found,
            notes=[*scorer.notes(), *self._reference_note(scorer.references)],
            label_accuracy=scored.label_accuracy,
            target_error=scored.target_error,
            target_baseline=None
            if scored.target_error is None
            else self._guess(attempt.own or truth, attempt.mine()),
            candidates=scored.candidates,
            baselines={name: mean_of(rows) for name, rows in baselines.items()},
            calibration=scorer.calibration([image.cells for image in images]),
        )

    def scorer(self, kind: Input, truth: Truth, mine: Callable[[], list[Truth]] = list) -> Scorer:
        """Return the scorer of an input, with references that are no client's own originals."""
        if kind.name not in self._scorers:
            references = (
                kind.kept_references(self.kept(), self.seed)
                if self.data is None
                else kind.references(self.data, self.seed)
            )
            self._scorers[kind.name] = scorer_of(kind, references)
        scorer = self._scorers[kind.name]
        left = scorer.references
        for own in (truth, *(mine() if self.data is None else ())):
            left = None if left is None else left.without(own)
        return scorer if left is scorer.references else scorer_of(kind, left)

    def _guess(self, truth: Truth, mine: Sequence[Truth]) -> float | None:
        """Return how far a guess from what other clients kept is from the targets."""
        own = {content_bytes(image) for one in (truth, *mine) for image in one.images}
        others = {
            content: label
            for other in self.kept()
            if other.labels.shape[1:] == truth.labels.shape[1:]
            for image, label in zip(other.images, other.labels, strict=True)
            if (content := content_bytes(image)) not in own
        }
        if not others:
            return None
        return target_guess(torch.stack(list(others.values())), truth.labels, seed=self.seed)

    def _reference_note(self, references: References | None) -> list[str]:
        if self.data is not None:
            return []
        return [NO_REFERENCE if references is None else KEPT_REFERENCE]

    def _diagnose(self, attempt: Attempt, truth: Truth | None) -> Signals | None:
        """Measure why it got this far; None where no gradient was matched."""
        try:
            found = signals(attempt.case, attempt.result)
        except BractError as error:
            _log.info("%s: no diagnosis: %s", attempt.case.observation.key, error)
            return None
        check = matched = None
        if truth is not None:
            simulated = attempt.case.simulating(unroll=attempt.result.pick.unroll)
            try:
                check = truth_check(attempt.case, truth.images, truth.entered)
                matched = truth_match(simulated, truth.images, truth.entered)
            except BractError as error:
                _log.info("%s: no truth check: %s", attempt.case.observation.key, error)
        return found.model_copy(
            update={"truth_check": check, "truth_match": matched, "estimate": attempt.estimate}
        )


def _image(
    kind: Input,
    scorer: Scorer,
    result: Reconstruction,
    index: int,
    row: int,
    path: Path,
    scored: ScoredImages | None = None,
    *,
    labelled: bool,
) -> ImageResult:
    """Save one reconstruction; return what the attacker knows of it."""
    probabilities = result.label_probabilities[row]
    certainty = result.pick.certainty
    beside = (None, None) if scored is None else (scored.originals[index], scored.labels[index])
    return ImageResult(
        index=index,
        label=int(probabilities.argmax()) if labelled else None,
        label_confidence=float(probabilities.max()) if labelled else None,
        cells=scorer.cells(
            result.images[row],
            float(result.targets[row]),
            None if certainty is None else certainty[row],
            *beside,
        ),
        reconstruction=kind.save(result.images[row], path, index, "reconstruction"),
    )
