"""What uploads can tell at most, before anything is spent on them."""

from __future__ import annotations

import logging
from typing import Any

from bract.attacks import Case
from bract.attacks.problem.identifiability import Identifiability, identifiability
from bract.errors import out_of_memory
from bract.schema import Told

_log = logging.getLogger(__name__)


class Prospects:
    """Identifiability of cases, each as if it were the only one: cases that cannot differ share it.

    Results must not depend on which uploads an audit, or a worker of one, has seen before.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, Told | None]] = []

    def of(self, case: Case) -> Told | None:
        """Return what a case's upload can tell at most; None where that cannot be computed."""
        evidence, observation = case.evidence, case.observation
        if evidence.bounds is not None or evidence.weights is not None:
            return _told(case)
        labels = None if evidence.labels is None else evidence.labels.tolist()
        zeros = [int((value == 0.0).sum()) for value in evidence.target.values()]
        defenses = observation.declaration.defenses
        key = (observation.round, case.tier, case.shape, defenses, labels, zeros)
        for known, found in self._known:
            if known == key:
                return found
        told = _told(case)
        self._known.append((key, told))
        return told

    def why_hopeless(self, case: Case) -> str | None:
        """Say why little can be expected of an attack on a case; None where more may be."""
        told = self.of(case)
        if told is None or not told.hidden:
            return None
        return (
            f"the {told.numbers} numbers of the update tell {told.pixels} pixels too little: "
            f"knowing only that neighbouring pixels are alike, one can expect {told.psnr:.1f} dB "
            f"at most, and from a guess that sees no update {told.prior_psnr:.1f} dB"
        )


def _told(case: Case) -> Told | None:
    try:
        found: Identifiability = identifiability(case)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            _log.info("%s: no bound: %s", case.observation.key, error)
        return None
    return Told(
        psnr=found.psnr, prior_psnr=found.prior_psnr, numbers=found.numbers, pixels=found.pixels
    )
