"""Which attacks handle an input: one answer for describe, audit and report."""

from __future__ import annotations

from collections.abc import Sequence

from bract.attacks import ATTACKS
from bract.errors import shown
from bract.inputs import INPUTS
from bract.registry import unknown


def why_unhandled(kind: str, attack: str = "", handled: Sequence[str] = ()) -> str | None:
    """Return why an input cannot be attacked, in one line that names it; None where it can.

    Parameters
    ----------
    kind
        Name of the input, as a client or a person declared it.
    attack, handled
        An attack and the inputs that it handles; without them any attack will do.
    """
    if kind not in INPUTS:
        return unknown("input", kind, INPUTS)
    others = [name for name in ATTACKS if kind in ATTACKS[name].inputs]
    if not attack:
        return None if others else f"no attack handles the input {shown(kind)}"
    if kind in handled:
        return None
    return (
        f"the attack {attack} handles the input {', '.join(handled)}, and the client trains on "
        f"{shown(kind)}; attacks for it: {', '.join(others) or 'none'}"
    )
