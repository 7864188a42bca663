"""Check the description of an upload before anything is judged by it.

Where the client kept what it trained on, its computation is repeated and compared with what was
captured (`bract.audit.description.truth_check`); where the two differ, the nearest other
descriptions are tried. Without truth, invariants of every such upload are checked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import rounding
from bract.attacks.task import AttackTask, open_cases
from bract.audit.description.alternatives import (
    CONFIRMED,
    SCALE,
    Alternative,
    rounded_to,
)
from bract.audit.description.explaining import explaining
from bract.audit.description.invariants import failing_invariants
from bract.audit.description.noise import Residue, hides, undeclared_noise
from bract.audit.description.orders import (
    ORDERS,
    Spread,
    explaining_epochs,
    explaining_orders,
    spread_of,
)
from bract.audit.description.search_time import SearchTime
from bract.audit.description.truth_check import (
    Repeated,
    compare,
    draws_at_random,
    repeat_client,
)
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.inputs import Truth
from bract.schema.check import CheckState, DescriptionCheck, TensorCheck

_log = logging.getLogger(__name__)

ROUNDED = 0.1
"""Share of an update up to which its rounding may be, for a comparison to say anything."""

ROUNDING = 3.0
"""Factor from the difference that rounding makes of a simulation to one that it may explain."""

LENGTH = 0.25
"""Most of a length that rounding explains beside its own: far from the half and the double that a
wrong learning rate or a sum makes, also where a normalisation by few images enlarges rounding."""

ALONG = 0.3
"""Least cosine of what bfloat16 loses in a simulation and of what the client's update lacks: far
above chance for any network, and below what rounding leaves after many layers."""

EPOCHS_SECONDS = 2.0
"""Processor time after which no other number of local epochs is begun."""

WORST = 5
"""Tensors that are listed."""

EXACT = 1e-9
"""Distance below which descriptions fit alike: what rounding to float32 leaves."""

ALIKE = 1e-6
"""Distance from a cosine of 1 up to which no other description is looked for."""

NEARER = 0.1
"""Another description fits better where it leaves less than this share of the distance."""


def check_upload(
    observation: Observation,
    truth: Truth | None,
    task: AttackTask,
    *,
    earlier: Sequence[Observation] = (),
) -> DescriptionCheck:
    """Check the description of one upload, as the attacker of a tier reads it.

    Parameters
    ----------
    truth
        What the client kept of the round; None checks invariants alone.
    task
        Its tier and history read the evidence.
    earlier
        Uploads of the same client in earlier rounds, for invariants over rounds.
    """
    failing = failing_invariants(observation, earlier)
    noise = undeclared_noise(observation)
    if truth is None:
        return with_noise(without_truth(failing), noise)
    case = open_cases([observation], task, attack="check")[0][0]
    if not isinstance(case, Case):
        return DescriptionCheck(state="open", failing=failing, reason=case.reason)
    try:
        found = check_case(case, truth.images, truth.entered, failing=failing)[0]
        return with_noise(found, noise)
    except (BractError, RuntimeError, ValueError) as error:
        _log.info("%s: no check of the description: %s", observation.key, error)
        return DescriptionCheck(
            state="open", failing=failing, reason="the client's steps could not be repeated"
        )


def without_truth(failing: Sequence[str]) -> DescriptionCheck:
    """Return the check of an upload whose client kept nothing."""
    reason = "the client kept nothing to repeat its steps on"
    if failing:
        reason = f"{reason}, and {failing[0]}"
    return DescriptionCheck(state="open", failing=list(failing), reason=reason)


def with_noise(check: DescriptionCheck, noise: Residue | None) -> DescriptionCheck:
    """Return a check with the noise that no declaration explains.

    Where it is most of the update nothing can be shown by repeating the client's steps.
    """
    if noise is None:
        return check
    found = check.model_copy(update={"noise": noise.size})
    if check.state == "contradicted" and check.alternative is None and hides(noise):
        words = f"noise of about {noise.size:.2g} a coordinate hides the update; none is declared"
        return found.model_copy(update={"state": "open", "reason": words})
    return found


def check_case(
    case: Case,
    images: Tensor,
    labels: Tensor,
    *,
    failing: Sequence[str] = (),
    guessed: Collection[str] = (),
    thorough: bool = False,
    look: bool = True,
    clock: SearchTime | None = None,
) -> tuple[DescriptionCheck, list[Alternative]]:
    """Repeat the client on what it kept; return the check, and the descriptions that explain it.

    Parameters
    ----------
    images, labels
        As in `bract.audit.description.truth_check.truth_check`.
    guessed
        Fields of the declaration that nothing declares.
    thorough
        Look for a still better description of an upload that is confirmed, too.
    look
        Look for other descriptions at all.
    clock
        The time for that; it notes what is not tried for want of time.
    """
    clock = clock or SearchTime()
    made = repeat_client(case, images, labels)
    if made is None:
        check = DescriptionCheck(
            state="open",
            failing=list(failing),
            reason="the client's steps cannot be repeated: an optimizer that is not simulated, "
            "too many steps, or a part of the model that stays at the client",
        )
        return check, []
    cosine, scale = made.compared
    found: list[Alternative] = []
    spread = None if made.exact else spread_of(made)
    state, reason, doubted = _judge(made, cosine, scale, spread)
    plain = made.plain and not case.observation.declaration.defenses
    # Invariants allow for arithmetic in 16 bits.
    if state == "contradicted" and plain and not failing:
        # First: a rate or a term that is off by little fits such an update by chance.
        for arithmetic in (torch.float32, torch.bfloat16):
            if _is_rounding(made, arithmetic, cosine, scale):
                words = f"it differs no more than {str(arithmetic).removeprefix('torch.')} explains"
                state, reason = "open", words
                break
    if look and spread is not None and state != "confirmed":
        found = _best_first(list(explaining_orders(made, clock)))
    elif (
        look
        and plain
        and made.exact
        and (state == "contradicted" or (thorough and 1.0 - cosine > ALIKE))
    ):
        if "local_epochs" in guessed and state == "contradicted":
            found = list(explaining_epochs(made, time.thread_time() + EPOCHS_SECONDS, clock))
        # Passes over all examples are much like as many batches of a part of them.
        if not any(_apart(one) <= ALIKE for one in found):
            found += explaining(made, guessed, clock)
        if state != "contradicted":
            found = [one for one in found if _apart(one) < NEARER * (1.0 - cosine)]
        found = _best_first(found)
    best = found[0] if found else None
    if best is not None:
        ending = "explains the update" if state == "contradicted" else "explains it still better"
        reason = f"{reason}; {best.words} {ending}"
    check = DescriptionCheck(
        state=state,
        doubted=doubted and state == "open",
        cosine=cosine,
        scale=scale,
        alternative=best.words if best else None,
        alternative_cosine=best.cosine if best else None,
        failing=list(failing),
        tensors=[] if state == "confirmed" else worst_tensors(made),
        reason=reason,
    )
    return check, found


def _best_first(found: Sequence[Alternative]) -> list[Alternative]:
    """Put the description first that fits best; of those that fit about alike, the nearest."""
    left, ordered = list(found), []
    while left:
        least = min(_apart(one) for one in left)
        best = next(one for one in left if _apart(one) <= max(least, EXACT) / NEARER)
        ordered.append(best)
        left.remove(best)
    return ordered


def _apart(one: Alternative) -> float:
    """Half the squared distance of directions and lengths, as a share."""
    return 1.0 - one.cosine + ((one.scale or 0.0) - 1.0) ** 2 / 2.0


def _judge(
    made: Repeated, cosine: float, scale: float | None, spread: Spread | None
) -> tuple[CheckState, str, bool]:
    """Return the state, the reason, and whether what is unknown may be why the two differ."""
    p = made.case.observation.declaration
    scaled = made.case.law.scaled
    seen = f"cosine {cosine:.6f}" if cosine > 0.999 else f"cosine {cosine:.3f}"
    seen += f", {scale:.3g} times as long" if scale is not None and abs(scale - 1) > 1e-3 else ""
    allowed = _rounding(made.case)
    within = cosine > CONFIRMED - allowed**2
    length = abs((scale if scale is not None and scaled else 1.0) - 1.0) < SCALE + allowed
    if scale is None:
        moved = any(bool(v.any()) for v in made.target.values())
        return (
            "contradicted",
            (
                "the update is not what the described client sends, which moves nothing"
                if moved
                else "the update is zero, and the described client moves"
            ),
            False,
        )
    if within and length and allowed <= ROUNDED:
        return "confirmed", f"the client's steps, repeated on what it kept, give it ({seen})", False
    if within and length:
        return "open", f"rounding hides most of the update ({seen})", False
    if p.defenses:
        return "open", f"a declared defense changed it ({seen})", False
    if spread is not None:
        return _judge_order(spread)
    if not made.exact:
        return (
            "open",
            f"{_unknown(made)}, is unknown, and would hide another fault of the description "
            f"({seen})",
            True,
        )
    if draws_at_random(made):
        return "open", f"the model draws at random while it trains, as dropout does ({seen})", True
    return (
        "contradicted",
        f"the client's steps, repeated on what it kept, give another ({seen})",
        False,
    )


def _unknown(made: Repeated) -> str:
    """Return what is not known of a client's steps, in words."""
    augmented = made.case.observation.declaration.augmentation
    drawn = "how later passes were augmented, " if augmented else ""
    return f"{drawn}the order of later epochs, or what dropout left out"


def _judge_order(spread: Spread) -> tuple[CheckState, str, bool]:
    """Return the same of an update whose later passes are in an unknown order."""
    seen = f"cosine {spread.cosine:.3f} with their mean"
    if spread.is_within:
        return (
            "confirmed",
            f"the client's steps, repeated on what it kept in {ORDERS} orders of its later passes, "
            f"differ from it as they do from each other ({seen})",
            False,
        )
    if spread.is_beyond:
        return (
            "contradicted",
            "the client's steps, repeated on what it kept, give another in any order of its later "
            f"passes: it is {math.sqrt(spread.ratio):.2g} times as far from {ORDERS} of them as "
            f"they are from each other ({seen})",
            False,
        )
    return "open", f"the order of later passes is unknown, and moves the update far ({seen})", True


def _rounding(case: Case) -> float:
    """Return the share of the update that rounding to float32 may have left in it."""
    errors = [
        rounding(case, name) * float(value.double().norm())
        for name, value in case.observation.update.items()
        if name in case.observation.parameters
    ]
    whole = math.sqrt(
        sum(float(v.double().square().sum()) for v in case.observation.update.values())
    )
    return math.sqrt(sum(e * e for e in errors)) / max(whole, 1e-300)


def _is_rounding(
    made: Repeated, arithmetic: torch.dtype, cosine: float, scale: float | None
) -> bool:
    """Return whether a simulation in a client's arithmetic differs as much, and in the same way.

    float32 makes a difference where a client enlarges it: by Adam, which takes a whole step for a
    gradient that is zero but for rounding, or over many steps through a normalisation by few
    images; any direction is possible then. bfloat16 is no such noise: the same weights and inputs
    lose the same digits in any implementation, so what it changed points where that of the
    simulation does, and any other error of a description nearly at a right angle to it: of n
    values by chance at a cosine of ``1 / sqrt(n)``.
    """
    if scale is None or cosine <= 0.0:
        return False
    rounded = rounded_to(made, arithmetic)
    other, own = compare(made.simulated, rounded, None)
    if own is None:
        return False
    allowed = ROUNDING * math.sqrt(max(0.0, 2.0 - 2.0 * other))
    longer = max(SCALE, allowed, ROUNDING * abs(own - 1.0))
    if math.sqrt(max(0.0, 2.0 - 2.0 * cosine)) > allowed:
        return False
    if abs(scale - 1.0) > longer or abs(scale / own - 1.0) > LENGTH:
        return False
    if arithmetic is torch.float32:
        return True
    lost = {name: value - made.simulated[name] for name, value in rounded.items()}
    apart = {name: made.target[name] - made.simulated[name] for name in rounded}
    return compare(lost, apart, None)[0] >= ALONG


def worst_tensors(made: Repeated) -> list[TensorCheck]:
    """Return the tensors with the largest share of the difference, the worst first."""
    apart = {
        name: float((made.target[name] - value).square().sum())
        for name, value in made.simulated.items()
        if name in made.target
    }
    whole = max(sum(apart.values()), 1e-300)
    found = []
    for name in sorted(apart, key=lambda n: -apart[n])[:WORST]:
        cosine, scale = compare({name: made.simulated[name]}, {name: made.target[name]}, None)
        found.append(TensorCheck(name=name, cosine=cosine, scale=scale, share=apart[name] / whole))
    return found
