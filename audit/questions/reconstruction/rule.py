"""Decide and tabulate reconstructions and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bract.audit.questions.reconstruction.words import LEAKED, held, in_a_line
from bract.audit.questions.rule import Decision, Held, Rule
from bract.schema import AuditResult
from bract.scores.leaks import LeakRule


class ReconstructionRule(Rule[AuditResult]):
    """Which inputs of the clients can be rebuilt."""

    name = "reconstruction"
    title = "Reconstruction"
    answer = AuditResult
    gates = (
        "ssim",
        "psnr",
        "mse",
        "lpips_alex",
        "lpips_vgg",
        "stlpips",
        "correlation",
        "nrmse",
        LEAKED,
    )
    position = 0

    @classmethod
    def decide(cls, answers: Sequence[AuditResult]) -> Decision:
        """Apply the leak rule with its default thresholds."""
        decisions = [one for row in LeakRule().decide(answers) for one in row]
        leaked = sum(one.reason is not None for one in decisions)
        scored = sum(a.scored for a in answers)
        open_ones = sum(not one.decided or not one.judged for one in decisions)
        level = "leaked" if leaked else "undecided" if open_ones else "none-leaked"
        words = f"{leaked} of {scored - open_ones} images leaked" if scored > open_ones else ""
        words = ", ".join(filter(None, (words, f"{open_ones} undecided" if open_ones else "")))
        return Decision(level, f"{words}.", found=leaked > 0)

    @classmethod
    def held(
        cls,
        answers: Sequence[AuditResult],
        field: str,
        *,
        tier: str | None,
        at: str | None,
        rule: Any,
    ) -> Held:
        """Return a score of every image, or the images that leaked by the rule."""
        del at
        return held(answers, field, tier, rule or LeakRule())

    @classmethod
    def in_a_line(cls, answer: AuditResult) -> str:
        """Return what an attack found on an observation, in a line."""
        return in_a_line(answer)
