"""When a reconstruction counts as a leaked image. Report, comparison and gate share this rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bract.config import FederationConfig, LeakConfig
from bract.server.report.schema import AuditFile, Baseline, ImageResult

Reason = Literal["ssim", "identified"]
Score = Literal["ssim", "psnr"]
Group = tuple[str, str, bool]
"""Attack, tier, and whether the aggregate was attacked."""


@dataclass(frozen=True)
class LeakRule:
    """The rule with its thresholds.

    Attributes
    ----------
    ssim
        Least structural similarity.
    psnr_margin
        Decibels by which an identified image must beat its guesses.
    level
        Share of the guesses made without the gradient that an image must beat, in (0, 1).
    """

    ssim: float = 0.5
    psnr_margin: float = 3.0
    level: float = 0.95

    @classmethod
    def of(cls, config: FederationConfig | None) -> LeakRule:
        """Return the rule of a run's configuration, the default one where there is none."""
        section = config.audit.leak if config else LeakConfig()
        return cls(section.ssim, section.psnr_margin, section.level)

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            f"An image counts as leaked when its reconstruction reaches an SSIM of at least "
            f"{self.ssim:g} and beats the guesses made without the gradient, those for this image "
            f"and {self.level:.0%} of those for all attacked images; or when it picks out its own "
            f"original among all candidates (top 1, by chance at most {1 - self.level:.0%}) and "
            f"its PSNR beats the guesses for this image by at least {self.psnr_margin:g} dB."
        )

    def reach(self, audits: Iterable[AuditFile]) -> dict[Group, float]:
        """Return the SSIM that guesses without the gradient reach at the level, by group.

        It is the ``level`` quantile over the group's scored images, of the baseline whose quantile
        is highest. A group without baselines for single images is left out.
        """
        pools: dict[Group, dict[str, list[float]]] = {}
        for audit in audits:
            for image in audit.images:
                for name, guess in image.baselines.items():
                    if audit.scored and guess.ssim is not None:
                        pool = pools.setdefault(group_of(audit), {})
                        pool.setdefault(name, []).append(guess.ssim)
        return {
            group: max(float(np.quantile(values, self.level)) for values in pool.values())
            for group, pool in pools.items()
        }

    def reason(
        self, image: ImageResult, audit: AuditFile, reach: Mapping[Group, float]
    ) -> Reason | None:
        """Say by which part of the rule an image leaked, or None if it did not.

        Guesses for the image are those recorded with it, else the means over its upload. Where
        none was recorded, the SSIM threshold alone decides and the second part cannot apply: a
        missing baseline must not hide a leak.
        """
        scores = image.scores
        if scores is None or not audit.scored:
            return None
        guesses = image.baselines or audit.baselines
        own, all_of_them = best(guesses, "ssim"), reach.get(group_of(audit))
        hurdle = max((v for v in (own, all_of_them) if v is not None), default=-1.0)
        if scores.ssim is not None and scores.ssim >= self.ssim and scores.ssim > hurdle:
            return "ssim"
        guess = best(guesses, "psnr")
        if guess is None or scores.psnr is None or not scores.identified_top1:
            return None
        if audit.candidates is not None and audit.candidates * (1.0 - self.level) < 1.0 - 1e-9:
            return None
        return "identified" if scores.psnr >= guess + self.psnr_margin else None


def leaked_images(
    audits: Sequence[AuditFile], rule: LeakRule
) -> list[tuple[AuditFile, ImageResult, Reason]]:
    """Return every leaked image of an audit with the upload it came from, and why."""
    reach = rule.reach(audits)
    return [
        (audit, image, reason)
        for audit in audits
        for image in audit.images
        if (reason := rule.reason(image, audit, reach)) is not None
    ]


def group_of(audit: AuditFile) -> Group:
    """Return what an audit's images are pooled and tabled by."""
    return audit.attack, audit.tier, bool(audit.members)


def best(baselines: Mapping[str, Baseline], score: Score) -> float | None:
    """Return the highest SSIM or PSNR among the baselines; None where none was recorded."""
    values = [getattr(baseline, score) for baseline in baselines.values()]
    return max((value for value in values if value is not None), default=None)
