"""From a reconstruction to what the audit writes: scores, guesses without a gradient, signals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Budget, Reconstruction, attack
from bract.attacks.baselines import prior_only
from bract.attacks.diagnosis import signals
from bract.attacks.evidence import Tier
from bract.attacks.metrics import mse, oracle, psnr, ssim
from bract.config import DataConfig
from bract.errors import BractError
from bract.observation import Observation
from bract.seeds import derive_seed
from bract.server.pictures import save_picture
from bract.server.reference import Reference
from bract.server.scoring import ScoredImages, Truth, lpips_notes, score_images
from bract.server.truth_check import truth_check

_log = logging.getLogger(__name__)

PRIOR_ITERATIONS = 200
"""Steps of the prior-only baseline: with no gradient to match, it settles early."""

_SCORES = {"mse": mse, "psnr": psnr, "ssim": ssim}

Guesses = dict[str, list[dict[str, float]]]
"""Scores of each guess without a gradient, one entry an image, by the baseline's name."""


@dataclass(frozen=True)
class Attempt:
    """One attack on one observation, as it ran.

    Attributes
    ----------
    tier
        What the attacker knew when it read the update.
    history
        Earlier observations of the same client.
    """

    name: str
    observation: Observation
    result: Reconstruction
    tier: Tier
    history: Sequence[Observation] = ()

    @property
    def method(self) -> str:
        """The attack that made the images: the one that was chosen, where there was a choice."""
        return str(self.result.settings.get("chosen", self.name))


@dataclass
class Judge:
    """Scores attempts; reference images and prior-only images are made once.

    Parameters
    ----------
    data
        Where the reference images come from; they are test data, which nobody trained on.
    seed, device, max_images
        As in the audit's choice.
    """

    data: DataConfig
    seed: int
    device: str
    max_images: int
    reference: Reference = field(init=False, repr=False)
    _priors: dict[tuple[str, int], Tensor | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.reference = Reference(self.data, self.seed)

    def judge(self, attempt: Attempt, truth: Truth | None, path: Path) -> dict[str, Any]:
        """Save the pictures beside ``path``; return facts, scored where the truth is known."""
        result = attempt.result
        facts = {
            "method": attempt.method,
            "scored": truth is not None,
            "notes": lpips_notes(),
            "diagnosis": self._diagnose(attempt, truth),
        }
        if truth is None:
            return facts | {"images": self._unscored(result, path)}
        scored = score_images(result.images, result.labels, truth, self.reference.candidates)
        guesses = self._guesses(attempt, scored)
        pick = result.all_restarts[
            oracle([r.images for r in result.all_restarts], scored.originals)
        ]
        best = score_images(
            pick.images,
            pick.label_probabilities.argmax(1),
            Truth(scored.originals, torch.tensor(scored.labels)),
            self.reference.candidates,
            identify=scored.identified,
        ).rows
        return facts | {
            "label_accuracy": scored.label_accuracy,
            "candidates": scored.candidates,
            "baselines": {name: _mean(rows) for name, rows in guesses.items()},
            "images": _scored_images(result, scored, best, guesses, path),
        }

    def _unscored(self, result: Reconstruction, path: Path) -> list[dict[str, Any]]:
        return [
            {
                **_picture_facts(result, i, i, path),
                "true_label": None,
                "original": None,
                "scores": None,
                "oracle": None,
                "baselines": {},
            }
            for i in range(len(result.images))
        ]

    def _diagnose(self, attempt: Attempt, truth: Truth | None) -> dict[str, Any] | None:
        """Measure why it got this far; None where no gradient was matched."""
        try:
            found = signals(
                attempt.observation,
                attempt.result,
                tier=attempt.tier,
                history=attempt.history,
                max_images=self.max_images,
            )
        except BractError as error:
            _log.info("%s: no diagnosis: %s", attempt.observation.key, error)
            return None
        check = None
        if truth is not None:
            try:
                check = truth_check(
                    attempt.observation,
                    truth.images,
                    truth.labels,
                    tier=attempt.tier,
                    history=attempt.history,
                )
            except BractError as error:
                _log.info("%s: no truth check: %s", attempt.observation.key, error)
        return {**found, "truth_check": check}

    def _guesses(self, attempt: Attempt, scored: ScoredImages) -> Guesses:
        """Score what needs no gradient against the same originals, image by image."""
        count = len(scored.originals)
        seed = derive_seed(self.seed, "baseline", attempt.observation.key)
        made: dict[str, Tensor | None] = {
            "class_mean": self.reference.class_mean(torch.tensor(scored.labels)),
            "random_image": self.reference.random_image(count, seed=seed),
            "prior_only": self._prior(attempt, count),
        }
        guesses: Guesses = {}
        for name, guess in made.items():
            if guess is not None:
                scores = {n: score(guess, scored.originals) for n, score in _SCORES.items()}
                guesses[name] = [
                    {n: float(values[i]) for n, values in scores.items()} for i in range(count)
                ]
        return guesses

    def _prior(self, attempt: Attempt, count: int) -> Tensor | None:
        """Return what the attack makes without a gradient to match; the same for every client."""
        name = attempt.method
        if (name, count) not in self._priors:
            try:
                result = prior_only(attack(name))(
                    attempt.observation,
                    budget=Budget(iterations=PRIOR_ITERATIONS, max_images=self.max_images),
                    seed=derive_seed(self.seed, "prior", name),
                    device=self.device,
                )
                self._priors[name, count] = result.images[:count]
            except BractError as error:
                _log.info("%s: no prior-only baseline: %s", name, str(error))
                self._priors[name, count] = None
        return self._priors[name, count]


def _scored_images(
    result: Reconstruction,
    scored: ScoredImages,
    best: list[dict[str, Any]],
    guesses: Guesses,
    path: Path,
) -> list[dict[str, Any]]:
    return [
        {
            **_picture_facts(result, i, int(scored.order[i]), path),
            "true_label": scored.labels[i],
            "original": save_picture(scored.originals[i], path, i, "original"),
            "scores": row,
            "oracle": best[i],
            "baselines": {name: rows[i] for name, rows in guesses.items()},
        }
        for i, row in enumerate(scored.rows)
    ]


def _picture_facts(result: Reconstruction, index: int, row: int, path: Path) -> dict[str, Any]:
    probabilities = result.label_probabilities[row]
    return {
        "index": index,
        "label": int(probabilities.argmax()),
        "label_confidence": float(probabilities.max()),
        "reconstruction": save_picture(result.images[row], path, index, "reconstruction"),
    }


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
