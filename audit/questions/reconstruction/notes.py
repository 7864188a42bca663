"""What a reader of a reconstruction has to know about how it was made."""

from __future__ import annotations

import math

from bract.attacks import ATTACKS, Case
from bract.attacks.problem.public_prior import PublicPrior
from bract.audit.captures import Capture

MEAN_OF_DEFENDED = (
    "The aggregate of defended updates was attacked as it is (an oblivious reading): what undoes a "
    "defense works on one client's update."
)


def notes_of(case: Case, capture: Capture, matched: Capture) -> list[str]:
    """Return the notes on one attacked capture.

    Parameters
    ----------
    matched
        The capture, with those earlier rounds alone that the reconstruction was held against.
    """
    return [
        *_statistics_notes(case),
        *_left_out_notes(matched, capture),
        *_rounding_notes(matched),
        *([MEAN_OF_DEFENDED] if capture.declaration.defenses and capture.members else []),
    ]


def _left_out_notes(matched: Capture, capture: Capture) -> list[str]:
    """Name the rounds of a joint attack that nothing was held against."""
    used = {one.round for one in matched.rounds}
    left = [str(one.round) for one in capture.rounds if one.round not in used]
    if not left:
        return []
    return [
        f"Left out of the attack over rounds: round {', '.join(left)}, which could not be opened, "
        "or holds noise that the others are free of."
    ]


def _statistics_notes(case: Case) -> list[str]:
    """Note batch statistics that were discarded as impossible."""
    whys = [(one, one.evidence.notes.get("batch_statistics")) for one in case.rounds or (case,)]
    return [
        f"The batch statistics returned in round {one.observation.round} were left out, since no "
        f"training leaves them: {why}."
        for one, why in whys
        if why is not None
    ]


def prior_notes(public: PublicPrior | None, *, checked: bool) -> list[str]:
    """Name the public images that the attacker held."""
    if public is None:
        return []
    held = f"The attacker held {public.text}"
    if checked:
        return [
            f"{held}; none of this upload's images is among those, nor mirrored, turned or shifted "
            "by a few pixels."
        ]
    return [
        f"{held}; whether this upload's images are among those was not checked, for want of the "
        "client's truth."
    ]


def _rounding_notes(capture: Capture) -> list[str]:
    """Note that an update came or was stored rounded; losses of like size give the same words."""
    if capture.rounded is None:
        return []
    if capture.rounded.error is None:
        return [
            f"Clients sent updates rounded to {capture.rounded.dtype} (training.update_dtype): no "
            "server has more digits of them."
        ]
    size = 10.0 ** math.ceil(math.log10(max(capture.rounded.error, 1e-9)))
    return [
        f"Updates were stored rounded to {capture.rounded.dtype} (capture.dtype), by less than "
        f"{size:.0e} of their norm: a server that keeps them as they come may get more out of them."
    ]


def cut_notes(attack: str, cut_off: bool) -> list[str]:
    """Note that what an attack had found until it was cut off is what is shown."""
    if not cut_off:
        return []
    return [
        f"{ATTACKS[attack].title or attack} was cut off, as the time of the whole audit was over "
        "by half: what it had found until then is shown and scored."
    ]
