"""Rule by which an image counts as leaked, shared by report, comparison and gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bract.config import FederationConfig
from bract.config.config import LeakConfig
from bract.schema import AuditResult
from bract.schema.audit import Baseline, ImageResult, Scores
from bract.scores.hommel import named
from bract.scores.judging import Checked

PRIOR_NEAREST = "prior_nearest"
"""Baseline of a surrogate tier: the nearest to the original of many samples of its generator."""

COPY_DB = 40.0
"""PSNR from which on an image may be a copy: every pixel is right to about 1 % of the range."""

COPY_MARGIN_DB = 20.0
"""Decibels by which a copy is above the best baseline: ten times nearer than anything that is made
without the gradient."""

COPY_COLUMNS = 20
"""Columns of a row that is right in all of them and that the best baseline has wrong, from which on
it is a copy: a guess that is right in every second of them is right in all once in a million. So
many different values have to be in the row: equal columns are no guesses of their own."""

Reason = Literal["ssim", "identified", "features", "correlation"]
Score = Literal["ssim", "psnr", "features", "precision", "correlation"]


@dataclass(frozen=True)
class Decision:
    """What the rule says of one reconstructed image.

    Attributes
    ----------
    reason
        By which part of the rule it leaked, None if it did not.
    decided
        False where the image was scored, but not even an exact copy of an original would have
        stood out: too few reference images of its class for this many images.
    judged
        False where it was scored and did not leak, and its upload is not what its description says
        (`bract.scores.judging`): then that shows nothing.
    """

    reason: Reason | None = None
    decided: bool = True
    judged: bool = True


@dataclass(frozen=True)
class LeakRule:
    """The rule with its thresholds.

    Attributes
    ----------
    ssim
        Least structural similarity.
    psnr_margin
        Decibels by which an image below that must beat its baselines.
    features_margin
        Share of a row's features by which more must be right than of its baselines, the nearest
        public row among them; all right is enough.
    correlation
        Least correlation over time of a signal.
    level
        One minus the probability that any image of a run counts as leaked whose reconstruction saw
        no gradient, in (0, 1).
    """

    ssim: float = 0.5
    psnr_margin: float = 3.0
    level: float = 0.95
    features_margin: float = 0.2
    correlation: float = 0.9

    @classmethod
    def of(cls, config: FederationConfig | None) -> LeakRule:
        """Return the rule of a run's configuration, the default one where there is none."""
        section = config.audit.leak if config else LeakConfig()
        return cls(section.ssim, section.psnr_margin, section.level, section.features_margin)

    def in_words(self, noun: str) -> str:
        """Return the rule in words, of an example that is called so."""
        known = {"row": self.row_text, "text": self.text_text, "signal": self.signal_text}
        return known.get(noun, self.text)

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            "An image counts as leaked when its reconstruction is nearer to its own original than "
            "to any reference image of the same class and to their mean, so much nearer that "
            "images made without the gradient would bring about a single such case in at most "
            f"{1 - self.level:.0%} of runs, however many images and originals there were to choose "
            "among, of clients whose images are like the references; and when it can be seen: its "
            f"SSIM is at least {self.ssim:g}, or its PSNR at least {self.psnr_margin:g} dB above "
            "the best baseline without the gradient, which had the same choice of originals. With "
            "too few reference images to tell, a copy counts alone: at "
            f"{COPY_DB:g} dB or more, and {COPY_MARGIN_DB:g} dB above the best baseline. Where the "
            "attacker had a generator trained on public images, it must besides be nearer than "
            "the nearest of its samples."
        )

    @property
    def row_text(self) -> str:
        """The rule for rows of a table in words."""
        return (
            "A row counts as leaked when its reconstruction is nearer to its own original than to "
            "any reference row of the same class and to their mean and mode, so much nearer that "
            "rows made without the gradient would bring about a single such case in at most "
            f"{1 - self.level:.0%} of runs, of clients whose rows are like the references; and "
            f"when all its features are right, or {self.features_margin:.0%} more of them than of "
            "the best baseline without the gradient, the nearest public row to the original among "
            "these. A number is right within the tolerance that its column declares. With too few "
            "reference rows to tell, a copy counts alone: all its features are right, and the best "
            f"baseline has {COPY_COLUMNS} of them or more wrong."
        )

    @property
    def text_text(self) -> str:
        """The rule for texts in words."""
        return (
            "A text counts as leaked when its reconstruction is nearer to its own original than to "
            "any reference text and to their most frequent tokens, so much nearer that texts made "
            "without the gradient would bring about a single such case in at most "
            f"{1 - self.level:.0%} of runs, of clients whose texts are like the references; and "
            f"when all its tokens were recovered, or {self.features_margin:.0%} more of them than "
            "by the best baseline without the gradient, the nearest public text among these, in an "
            "order that chance does not explain, or with few tokens that are not its own. Tokens "
            "in no order and among many others are no text."
        )

    @property
    def signal_text(self) -> str:
        """The rule for signals in words."""
        return (
            "A signal counts as leaked when its reconstruction is nearer to its own original than "
            "to any reference signal of the same class and to their mean, so much nearer that "
            "signals made without the gradient would bring about a single such case in at most "
            f"{1 - self.level:.0%} of runs, of clients whose signals are like the references; and "
            f"when its correlation over time is at least {self.correlation:g}, or its error at "
            f"least {self.psnr_margin:g} dB (a factor of {10 ** (self.psnr_margin / 20):.1f}) "
            "below that of the best baseline without the gradient, which had the same choice of "
            "originals. With too few reference signals to tell, a copy counts alone: an error of "
            f"at most {10 ** (-COPY_DB / 20):.0%} of the range, and a "
            f"{10 ** (COPY_MARGIN_DB / 20):.0f}th of the best baseline's."
        )

    def decide(self, audits: Sequence[AuditResult]) -> list[list[Decision]]:
        """Judge every image of what is judged together: all the results of a run or an audit.

        Each image has the bound on its chance of its retrieval; Hommel's procedure over all images
        says which of them are not chance. An image without one counts among them as undecided.

        Returns
        -------
        list of list of Decision
            One for each image of each result, in their order.
        """
        rate = 1.0 - self.level
        chances = [_chance(i) for audit in audits for i in audit.images if _scored(audit, i)]
        not_chance = iter(named(chances, rate))
        checked = Checked.of(audits)
        return [
            [
                _judged(
                    self._decide(image, audit, next(not_chance), rate / len(chances)),
                    judged=checked.of_answer(audit) is None,
                )
                if _scored(audit, image)
                else Decision()
                for image in audit.images
            ]
            for audit in audits
        ]

    def _in_parts(self, image: ImageResult, audit: AuditResult, scores: Scores) -> Reason | None:
        """Return how an example leaked whose parts were recovered; None for a mere set of tokens.

        A row has its columns. The tokens of a text can be recovered among many others and in no
        order: then they show which words occurred somewhere, and no text.
        """
        ordered = scores.order_chance is None or scores.order_chance <= 1.0 - self.level
        if scores.precision is None or scores.exact or ordered:
            return "features"
        most = best(image.baselines or audit.baselines, "precision")
        alone = most is not None and scores.precision >= min(1.0, most + self.features_margin)
        return "identified" if alone else None

    def _decide(
        self, image: ImageResult, audit: AuditResult, not_chance: bool, alone: float
    ) -> Decision:
        """Judge a scored image; ``alone`` is the chance that stands out beside all the others."""
        found, scores = image.retrieval, image.scores
        if found is None or found.least is None or scores is None:
            return _undecided(image, audit)
        if not not_chance:
            return Decision() if found.least <= alone else _undecided(image, audit)
        if not found.nearest or _within_the_prior(image):
            return Decision()
        return Decision(self.readable(image, audit))

    def readable(self, image: ImageResult, audit: AuditResult) -> Reason | None:
        """Return why a scored example can be read, whether or not chance could explain it."""
        scores = image.scores
        if scores is None:
            return None
        if scores.features is not None:
            most = best(image.baselines or audit.baselines, "features") or 0.0
            enough = scores.features >= min(1.0, most + self.features_margin)
            return self._in_parts(image, audit, scores) if enough else None
        if scores.ssim is not None and scores.ssim >= self.ssim:
            return "ssim"
        if scores.correlation is not None and scores.correlation >= self.correlation:
            return "correlation"
        baseline = best(image.baselines or audit.baselines, "psnr")
        if baseline is None or scores.psnr is None:
            return None
        return "identified" if scores.psnr >= baseline + self.psnr_margin else None


def _undecided(image: ImageResult, audit: AuditResult) -> Decision:
    """Return that an image leaked if it is a copy of its original, else that nothing decides it.

    Few references leave open how near other images of the class come. A copy is nearer than images
    come that are not the same: `COPY_DB`, and `COPY_MARGIN_DB` above what was made without the
    gradient, so that an original which is itself plain (a black image) is none. A row is one that
    is right in every column, of which no row without the gradient is in `COPY_COLUMNS`.
    """
    if _is_copied_row(image, audit):
        return Decision("features")
    baseline = best(image.baselines or audit.baselines, "psnr")
    own = None if image.scores is None else image.scores.psnr
    if own is None or baseline is None or _within_the_prior(image):
        return Decision(decided=False)
    is_copy = own >= max(COPY_DB, baseline + COPY_MARGIN_DB)
    if not is_copy:
        return Decision(decided=False)
    signal = image.scores is not None and image.scores.correlation is not None
    return Decision("correlation" if signal else "ssim")


def _is_copied_row(image: ImageResult, audit: AuditResult) -> bool:
    """Say whether a row is a copy; columns of the same value, as of a blank row, count as one."""
    most = best(image.baselines or audit.baselines, "features")
    if image.scores is None or not image.scores.exact or most is None:
        return False
    columns = image.cells[:-1]  # the target is the last cell
    wrong = round((1.0 - most) * len(columns))
    different = {one.value if one.original is None else one.original for one in columns}
    return min(wrong, len(different)) >= COPY_COLUMNS


def _judged(found: Decision, *, judged: bool) -> Decision:
    """Return a decision about an upload; what leaked stands, whatever the upload is."""
    return found if judged or found.reason is not None else Decision(judged=False)


def _within_the_prior(image: ImageResult) -> bool:
    """Say whether a sample of the attacker's generator is as near to the original."""
    sample = image.baselines.get(PRIOR_NEAREST)
    own = None if image.scores is None else image.scores.psnr
    return sample is not None and sample.psnr is not None and (own is None or own <= sample.psnr)


def _scored(audit: AuditResult, image: ImageResult) -> bool:
    return audit.scored > 0 and image.scores is not None


def _chance(image: ImageResult) -> float:
    found = image.retrieval
    return 1.0 if found is None or found.chance is None else found.chance


def undecided(count: int, scored: int, noun: str = "image") -> str:
    """Return a sentence on scored images that could not be judged, and the reason."""
    return (
        f"whether {count} of {scored} {noun}s leaked cannot be decided: the test data hold too few "
        f"{noun}s of their classes to tell a copy from chance"
    )


def best(baselines: Mapping[str, Baseline], score: Score) -> float | None:
    """Return the highest score among the baselines; None where none was recorded."""
    values = [getattr(baseline, score) for baseline in baselines.values()]
    return max((value for value in values if value is not None), default=None)


def least(baselines: Mapping[str, Baseline], score: Literal["nrmse"]) -> float | None:
    """Return the lowest error among the baselines; None where none was recorded."""
    values = [getattr(baseline, score) for baseline in baselines.values()]
    return min((value for value in values if value is not None), default=None)
