"""``--fail-on``: turn a leak above a threshold into exit code 3, for continuous integration."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.errors import BractError, LeakageError
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
            If the text is not of that form.
        """
        found = re.fullmatch(r"\s*(\w+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*(?:@\s*(\w+))?\s*", text)
        try:
            if found is None or found[1] not in _METRICS:
                raise ValueError
            return cls(found[1], found[2], float(found[3]), found[4])
        except ValueError:
            raise BractError(
                f"--fail-on {text!r}: expected METRIC>VALUE or METRIC>VALUE@TIER with a metric of "
                f"{', '.join(_METRICS)}, such as ssim>0.5@adaptive"
            ) from None

    def crossings(self, results: Sequence[dict[str, Any]], rule: LeakRule) -> list[str]:
        """Say which image of which observation crosses the threshold.

        Parameters
        ----------
        results
            What the audit wrote for each observation.
        rule
            When an image counts as leaked.

        Raises
        ------
        BractError
            If no image of this tier has the score: a gate that checks nothing must not pass.
        """
        mine = [r for r in results if self.tier is None or r["tier"] == self.tier]
        scored = [(r, i) for r in mine for i in r["images"] if i["scores"]]
        if self.metric == _LEAKED:
            leaked = leaked_images([AuditFile.model_validate(r) for r in mine], rule)
            lines = [
                f"{_where(audit.model_dump())}, image {image.index}: leaked by {reason}"
                for audit, image, reason in leaked
            ]
            judged = len(scored)
            crossed = _OPERATORS[self.comparison](len(lines), self.threshold)
            lines = (lines or ["no image leaked"]) if crossed else []
        else:
            known = [(r, i) for r, i in scored if i["scores"].get(self.metric) is not None]
            judged = len(known)
            lines = [
                f"{_where(r)}, image {i['index']}: {self.metric} {i['scores'][self.metric]:.3f}"
                for r, i in known
                if _OPERATORS[self.comparison](i["scores"][self.metric], self.threshold)
            ]
        if not judged:
            tier = f" of tier {self.tier}" if self.tier else ""
            raise BractError(
                f"--fail-on {self.metric}: no attacked image{tier} has this score; switch on the "
                "clients' truth, or attack with that tier"
            )
        return lines


def hold(gates: Iterable[Gate], results: Sequence[dict[str, Any]], rule: LeakRule) -> None:
    """Raise `LeakageError` where a result crosses a gate."""
    lines = [line for gate in gates for line in gate.crossings(results, rule)]
    if lines:
        shown = "\n".join(lines[:20])
        more = f"\nand {len(lines) - 20} more" if len(lines) > 20 else ""
        raise LeakageError(f"leakage above --fail-on in {len(lines)} images:\n{shown}{more}")


def rule_of(run: Path) -> LeakRule:
    """Return the rule of a run's configuration."""
    return LeakRule.of(RunDirectory.open(run).config())


def _where(facts: dict[str, Any]) -> str:
    return f"{facts['attack']} ({facts['tier']}), round {facts['round']}, {facts['client']}"
