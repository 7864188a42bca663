"""Which uploads there is no hope for, before anything is spent on them."""

from __future__ import annotations

from bract.attacks import ATTACKS
from bract.attacks.problem.client_model import images_in
from bract.audit.captures import Capture
from bract.audit.choice import AuditChoice
from bract.errors import BractError


def why_hopeless(capture: Capture, choice: AuditChoice, attack: str) -> str | None:
    """Say why an attack will bring nothing back from an upload; None where it may.

    Known from the declaration alone: ciphertexts without a key, more images in one update than
    are looked for, or too little declared to look for any.
    """
    declaration = capture.declaration
    if declaration.encryption != "none" and choice.tier != "colluding":
        return "ciphertexts, and the attacker holds no key"
    if not declaration.model:
        return "no model is declared"
    try:
        images = images_in(declaration, 1 << 31)
    except BractError as error:
        return str(error)
    if images > choice.max_images and ATTACKS[attack].batches != "any":
        return (
            f"{images} images went into one update, and {choice.max_images} are looked for "
            "(audit.max_images); expect nothing readable, but from closed forms"
        )
    return None
