"""``--fail-on``: turn a leak above a threshold into exit code 3, for continuous integration."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bract.errors import BractError

_METRICS = ("ssim", "psnr", "mse", "lpips_alex", "lpips_vgg", "stlpips")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class LeakageError(Exception):
    """What came back crosses a threshold of ``--fail-on``; the command exits with code 3."""


@dataclass(frozen=True)
class Gate:
    """One threshold on the blind score of any single image.

    Attributes
    ----------
    metric
        ``ssim``, ``psnr`` (dB), ``mse`` or an LPIPS.
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

    def crossings(self, results: Iterable[dict[str, Any]]) -> list[str]:
        """Say which image of which observation crosses the threshold.

        Parameters
        ----------
        results
            What the audit wrote for each observation.

        Raises
        ------
        BractError
            If no image of this tier has the score: a gate that checks nothing must not pass.
        """
        judged = 0
        lines = []
        for facts in results:
            if self.tier is not None and facts["tier"] != self.tier:
                continue
            for image in facts["images"]:
                value = (image["scores"] or {}).get(self.metric)
                if value is None:
                    continue
                judged += 1
                if _OPERATORS[self.comparison](value, self.threshold):
                    lines.append(
                        f"{facts['attack']} ({facts['tier']}), round {facts['round']}, "
                        f"{facts['client']}, image {image['index']}: {self.metric} {value:.3f}"
                    )
        if not judged:
            tier = f" of tier {self.tier}" if self.tier else ""
            raise BractError(
                f"--fail-on {self.metric}: no attacked image{tier} has this score; switch on the "
                "clients' truth, or attack with that tier"
            )
        return lines


def hold(gates: Iterable[Gate], results: list[dict[str, Any]]) -> None:
    """Raise `LeakageError` where a result crosses a gate."""
    lines = [line for gate in gates for line in gate.crossings(results)]
    if lines:
        shown = "\n".join(lines[:20])
        more = f"\nand {len(lines) - 20} more" if len(lines) > 20 else ""
        raise LeakageError(f"leakage above --fail-on in {len(lines)} images:\n{shown}{more}")
