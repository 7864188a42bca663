"""``--fail-on``: turn a leak above a threshold into exit code 3, for continuous integration."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.attacks.evidence import TIERS
from bract.cli.console import say
from bract.errors import BractError, LeakageError
from bract.registry import unknown
from bract.rundir import RunDirectory
from bract.server.report.leak import LeakRule, leaked_images
from bract.server.report.schema import AuditFile

_LEAKED = "leaked"
_METRICS = (_LEAKED, "ssim", "psnr", "mse", "lpips_alex", "lpips_vgg", "stlpips")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Gate:
    """One threshold on the blind score of any single image, or on the number of leaked ones.

    Attributes
    ----------
    metric
        ``ssim``, ``psnr`` (dB), ``mse`` or an LPIPS of an image; ``leaked`` counts the images that
        leaked by the configuration's rule.
    tier
        Only results of this tier count; None counts every tier.
    """

    metric: str
    comparison: str
    threshold: float
    tier: str | None = None

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read ``METRIC>VALUE`` or ``METRIC>VALUE@TIER``, such as ``ssim>0.5@adaptive``.

        Raises
        ------
        BractError
            If the text is not of that form, or names no tier.
        """
        found = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*(?:@\s*(\w+))?\s*", text)
        try:
            if found is None or found[1] not in _METRICS:
                raise ValueError
            gate = cls(found[1], found[2], float(found[3]), found[4])
        except ValueError:
            raise BractError(
                f"--fail-on {text!r}: expected METRIC>VALUE or METRIC>VALUE@TIER with a metric of "
                f"{', '.join(_METRICS)}, such as ssim>0.5@adaptive"
            ) from None
        if gate.tier is not None and gate.tier not in TIERS:
            raise BractError(f"--fail-on {text!r}: {unknown('tier', gate.tier, TIERS)}")
        return gate

    def __str__(self) -> str:
        tier = f"@{self.tier}" if self.tier else ""
        return f"{self.metric}{self.comparison}{self.threshold:g}{tier}"

    def judge(self, results: Sequence[dict[str, Any]], rule: LeakRule) -> Judgement:
        """Hold what the audit wrote for each observation against the threshold."""
        mine = [r for r in results if self.tier is None or r["tier"] == self.tier]
        scored = [(r, i) for r in mine for i in r["images"] if i["scores"]]
        if self.metric == _LEAKED:
            known = scored
            lines = self._leaks(mine, rule)
        else:
            known = [(r, i) for r, i in scored if i["scores"].get(self.metric) is not None]
            lines = [
                f"{_where(r)}, image {i['index']}: {self.metric} {i['scores'][self.metric]:.3f}"
                for r, i in known
                if _OPERATORS[self.comparison](i["scores"][self.metric], self.threshold)
            ]
        refused = [r for r in mine if r.get("refused")]
        unscored = [
            r for r in mine if not r.get("refused") and not any(i["scores"] for i in r["images"])
        ]
        return Judgement(
            gate=self,
            crossed=lines,
            judged=len(known),
            refused=len(refused),
            unscored=len(unscored),
            lacking=len(scored) - len(known),
            reason=str(refused[0]["refused"]) if refused else None,
        )

    def _leaks(self, results: Sequence[dict[str, Any]], rule: LeakRule) -> list[str]:
        leaked = leaked_images([AuditFile.model_validate(r) for r in results], rule)
        lines = [
            f"{_where(audit.model_dump())}, image {image.index}: leaked by {reason}"
            for audit, image, reason in leaked
        ]
        crossed = _OPERATORS[self.comparison](len(lines), self.threshold)
        return (lines or ["no image leaked"]) if crossed else []


@dataclass(frozen=True)
class Judgement:
    """What one gate found.

    Attributes
    ----------
    crossed
        Which image of which observation crosses the threshold, in words.
    judged, lacking
        Images that have the score, and scored images that lack it.
    refused, unscored
        Attacked observations of which nothing could be judged: no attack applied, or the client
        kept no truth.
    reason
        Why the first of the refused was refused.
    """

    gate: Gate
    crossed: list[str]
    judged: int
    refused: int
    unscored: int
    lacking: int
    reason: str | None = None

    def __str__(self) -> str:
        left = [
            f"{count} {what}"
            for count, what in (
                (self.refused, "attacks refused"),
                (self.unscored, "attacks without the client's truth"),
                (self.lacking, "images without this score"),
            )
            if count
        ]
        text = f"--fail-on {self.gate}: {self.judged} images judged"
        text += f", {len(self.crossed)} crossed it" if self.crossed else ""
        text += f"; not judged: {', '.join(left)}" if left else ""
        return f"{text}; first refusal: {self.reason}" if self.reason else text

    @property
    def complete(self) -> bool:
        """Whether everything that was attacked could be judged."""
        return not (self.refused or self.unscored or self.lacking)


def check_tiers(gates: Iterable[Gate], tiers: Sequence[str]) -> None:
    """See before any attack that each gate's tier is among those that will run.

    Raises
    ------
    BractError
        Naming the gate, and the tiers that apply to the run or were asked for.
    """
    for gate in gates:
        if gate.tier is not None and gate.tier not in tiers:
            raise BractError(
                f"--fail-on {gate}: this audit runs the tier{'s' * (len(tiers) > 1)} "
                f"{', '.join(tiers)}, and the gate would check nothing; adaptive needs a declared "
                "defense, colluding an encrypted run and a key, and --tier must not leave it out"
            )


def hold(gates: Iterable[Gate], results: Sequence[dict[str, Any]], rule: LeakRule) -> None:
    """Fail where a result crosses a gate, or where a gate had nothing to judge.

    What was refused or unscored beside judged images is counted in a line to the person: it does
    not fail the gate.

    Raises
    ------
    LeakageError
        Naming the images, or what could not be judged.
    """
    judgements = [gate.judge(results, rule) for gate in gates]
    failed = [j for j in judgements if j.crossed or not j.judged]
    for judgement in judgements:
        if judgement not in failed and not judgement.complete:
            say(f"warning: {judgement}")
    if failed:
        raise LeakageError("\n".join(_failure(judgement) for judgement in failed))


def _failure(judgement: Judgement) -> str:
    if not judgement.judged:
        return f"{judgement}; a gate that judged nothing does not pass"
    lines = judgement.crossed
    more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join([f"leakage: {judgement}", *lines[:20], *more])


def rule_of(run: Path) -> LeakRule:
    """Return the rule of a run's configuration."""
    return LeakRule.of(RunDirectory.open(run).config())


def _where(facts: dict[str, Any]) -> str:
    return f"{facts['attack']} ({facts['tier']}), round {facts['round']}, {facts['client']}"
