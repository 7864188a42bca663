"""Which attacks handle an input: one answer for describe, audit and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from bract.attacks import ATTACKS, Attack, attack
from bract.attacks.problem.probe_case import probe_case
from bract.captures.observation import ClientDeclaration
from bract.errors import BractError, shown
from bract.inputs import INPUTS


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
        return str(INPUTS.missing(kind))
    others = [name for name in ATTACKS if kind in ATTACKS[name].inputs]
    if not attack:
        return None if others else f"no attack handles the input {shown(kind)}"
    if kind in handled:
        return None
    return (
        f"the attack {attack} handles the input {', '.join(handled)}, and the client trains on "
        f"{shown(kind)}; attacks for it: {', '.join(others) or 'none'}"
    )


def check_attacks(
    names: Sequence[str], model: Callable[[], nn.Module], declaration: ClientDeclaration
) -> None:
    """Refuse attacks that no update of a model can serve, before anything is trained.

    Choices among attacks, such as `auto`, try what fits and are not refused.

    Parameters
    ----------
    names
        Registered names.
    model
        Builds the model, whose parameters may be changed; called where an attack looks at it.
    declaration
        Of the model and its data.

    Raises
    ------
    BractError
        If an attack is unknown, does not handle the input or needs a layer that the model lacks;
        it names the attack.
    """
    case = None
    for name in names:
        kind = attack(name)
        reason = why_unhandled(declaration.input, name, kind.inputs)
        if reason is None and isinstance(kind, Attack) and not kind.portfolio:
            case = case or probe_case(model(), declaration)
            try:
                kind.require_model(case)
            except BractError as error:
                reason = str(error).removeprefix(f"{case.observation.key}: ")
        if reason is not None:
            raise BractError(
                f"audit.attacks: {name} cannot attack this federation: {reason}; name another "
                "attack, or auto, which takes what fits",
                code="attack-unsuited",
            )
