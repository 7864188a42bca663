"""What one attack found, in a line, and what a gate compares of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from bract.audit.questions.rule import Held
from bract.schema import AuditResult
from bract.schema.audit import EXACT_DB
from bract.schema.inputs import outline_of
from bract.scores.leaks import LeakRule

LEAKED = "leaked"
"""Name of the gate that counts examples which leaked by the rule."""


def held(answers: Sequence[AuditResult], field: str, tier: str | None, rule: LeakRule) -> Held:
    """Return a score of every image of a tier, or those that leaked.

    Parameters
    ----------
    answers
        Results of every tier: what the rule corrects for is all that was attacked.
    """
    mine = [r for r in answers if tier in (None, r.tier)]
    unscored = sum(not r.refused and not any(i.scores for i in r.images) for r in mine)
    if field != LEAKED:
        values = [
            (f"{r.where}, image {i.index}", getattr(i.scores, field))
            for r in mine
            for i in r.images
            if i.scores
        ]
        return Held(values, "image", "without this score", unscored)
    found = [
        (f"{result.where}, image {image.index}: leaked by {decision.reason}", decision)
        for result, decisions in zip(answers, rule.decide(answers), strict=True)
        for image, decision in zip(result.images, decisions, strict=True)
        if image.scores and tier in (None, result.tier)
    ]
    return Held(
        [(line, 1.0 if d.decided and d.judged else None) for line, d in found],
        "image",
        "with too few reference images of their class to decide, or not judged",
        unscored,
        counted=[line for line, d in found if d.reason is not None],
        none="no image leaked",
    )


def in_a_line(result: AuditResult) -> str:
    """Return one result in a line; an upload that may not be judged is named as such first."""
    who = f"{result.attack} on round {result.round}, {result.client}"
    if result.method not in (None, result.attack):
        who = f"{who}, by {result.method}"
    if result.refused:
        return f"{who}: not attacked: {result.refused}"
    doubt = ""
    if result.check is not None and result.check.unjudged is not None:
        doubt = f"no verdict, {result.check.reason}; "
    return f"{who}: {doubt}{_found(result)}"


def _found(result: AuditResult) -> str:
    scores = [image.scores for image in result.images if image.scores]
    if not scores:
        return f"{_plural(len(result.images), 'reconstruction')}, unscored (no truth kept)"
    found = _plural(len(scores), outline_of(result.input).noun)
    known = [(row.ssim, row.psnr) for row in scores if None not in (row.ssim, row.psnr)]
    right = [row.features for row in scores if row.features is not None]
    if right:
        share, exact = sum(right) / len(right), sum(bool(row.exact) for row in scores)
        return f"{found}, {share:.0%} of each right, {exact} exact, {result.seconds or 0.0:.0f} s"
    alike = [(s.correlation, s.nrmse) for s in scores if None not in (s.correlation, s.nrmse)]
    if alike:
        near, error = max(alike)
        return (
            f"{found}, best correlation {near:.3f}, error {error:.2%} of the range, "
            f"{result.seconds or 0.0:.0f} s"
        )
    if not known:
        return f"{found}, none of them with finite scores"
    ssim, psnr = max(known)
    identified = [row.identified_top1 for row in scores if row.identified_top1 is not None]
    if identified:
        found = f"{sum(identified)} of {found} identified"
    capped = " (the cap)" if psnr is not None and psnr >= EXACT_DB else ""
    best = f"best SSIM {ssim:.2f}, PSNR {psnr:.1f} dB{capped}"
    return f"{found}, {best}, {result.seconds or 0.0:.0f} s"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
