"""Evidence that leaves nothing open about some gradients but their length."""

from __future__ import annotations

from collections.abc import Sequence

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import BatchGradient, DefendedForward
from bract.errors import BractError


def require_one_gradient(case: Case, attack: str) -> None:
    """Refuse what is no gradient of one batch, computed in one step of plain SGD."""
    forward = case.forward
    if isinstance(forward, DefendedForward) and forward.only_shortens:
        forward = forward.client
    if not case.law.one_gradient or not isinstance(forward, BatchGradient):
        raise BractError(
            f"{case.observation.key}: the update is no gradient of one batch; {attack} needs one "
            "step of plain SGD",
            code="attack-unsuited",
        )


def require_exact(
    case: Case,
    names: Sequence[str],
    attack: str,
    *,
    uneven_with_errors: bool = False,
    under_noise: bool = False,
) -> None:
    """Refuse evidence that leaves coordinates of these parameters open.

    Parameters
    ----------
    uneven_with_errors
        Whether weights may differ where the evidence has the error of every coordinate.
    under_noise
        Whether noise of a known deviation leaves nothing open.
    """
    evidence, key = case.evidence, case.observation.key
    if missing := [name for name in names if name not in evidence.target]:
        raise BractError(f"{key}: the evidence lacks {', '.join(missing)}", code="attack-evidence")
    doubtful = [evidence.alternatives, evidence.bounds, evidence.nuisance]
    weights = [(evidence.weights or {}).get(name) for name in names]
    uneven = any(w is not None and bool((w != w.flatten()[0]).any()) for w in weights)
    if (
        (evidence.noisy and not (under_noise and evidence.deviation))
        or (uneven and not (uneven_with_errors and evidence.errors))
        or any(
            group and any(name in group and bool(group[name].any()) for name in names)
            for group in doubtful
        )
    ):
        raise BractError(
            f"{key}: the defense leaves coordinates of {names[0]} open; {attack} needs all of "
            "them, to rounding",
            code="attack-evidence",
        )
